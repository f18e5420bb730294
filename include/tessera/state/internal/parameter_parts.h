#pragma once
// Converts parameters that are local tensors of DTensors to and from state dicts.

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/state/value.h"
#include "tessera/tensor/dtensor_parameters.h"

namespace tessera {

// Returns this rank's local tensor of a full tensor: a view if it is one box, else a copy.
at::Tensor local_of_full(const DTensorSpec& spec, const at::Tensor& full);

class ParameterParts {
 public:
  // No parameter is the local tensor of a DTensor.
  ParameterParts() = default;
  // Takes the specs from the module and its descendants (DTensorParameters), which must outlive this.
  explicit ParameterParts(const torch::nn::Module& module);

  bool empty() const { return specs_.empty(); }
  // Returns null if `parameter` is a plain tensor.
  const DTensorSpec* find(const at::Tensor& parameter) const;
  // Treats `parameter` as a plain tensor from now on.
  void remove(const at::Tensor& parameter) { specs_.erase(parameter.unsafeGetTensorImpl()); }

  // Returns the state dict's value for this rank's `local` tensor of a parameter, or of an optimizer's state of the
  // same shape.
  Value to_state(const at::Tensor& parameter, const at::Tensor& local) const;
  // Returns the size of that value.
  std::vector<std::int64_t> size_of(const at::Tensor& parameter) const;
  // The inverse of to_state; also accepts the full tensor. Returns nothing if `value` is not a tensor, has another
  // size, or has other boxes than the local tensor.
  std::optional<at::Tensor> from_state(const at::Tensor& parameter, const Value& value) const;

 private:
  void collect(const torch::nn::Module& module);

  std::map<const void*, const DTensorSpec*> specs_;
};

// Throws Error(unsupported) for an optimizer with one state for all parameters, which cannot work on local tensors.
template <typename Fields>
void check_parts(const ParameterParts& parts) {
  if (!Fields::kOneState || parts.empty()) return;
  fail(ErrorCode::unsupported,
       "optimizer state dict: {} with sharded parameters, expected an optimizer with a state for each parameter",
       Fields::kName);
}

}  // namespace tessera
