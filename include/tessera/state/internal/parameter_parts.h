#pragma once
// Parameters of a module that are local tensors of DTensors, in state dicts.

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/state/module_state.h"
#include "tessera/state/optimizer_state.h"
#include "tessera/state/value.h"
#include "tessera/tensor/dtensor_parameters.h"

namespace tessera {

// This rank's part of a whole tensor: a view where it is one box, else a copy.
at::Tensor local_of_full(const DTensorSpec& spec, const at::Tensor& whole);

class ParameterParts {
 public:
  // Of no parameter: all are tensors by themselves.
  ParameterParts() = default;
  // What the module and those in it say (DTensorParameters), which must outlive this.
  explicit ParameterParts(const torch::nn::Module& module);

  bool empty() const { return specs_.empty(); }
  // Null if `parameter` is a tensor by itself.
  const DTensorSpec* find(const at::Tensor& parameter) const;
  // From now on it is one.
  void remove(const at::Tensor& parameter) { specs_.erase(parameter.unsafeGetTensorImpl()); }

  // What a state dict has where this rank has `local` of a parameter, or of an optimizer's state that is as large.
  Value to_state(const at::Tensor& parameter, const at::Tensor& local) const;
  // The size of that.
  std::vector<std::int64_t> size_of(const at::Tensor& parameter) const;
  // The reverse of to_state, which also takes the whole tensor. Nothing if `value` is no tensor, or one of which the
  // local tensor can't be had: of another size, or cut in another way.
  std::optional<at::Tensor> from_state(const at::Tensor& parameter, const Value& value) const;

 private:
  void collect(const torch::nn::Module& module);

  std::map<const void*, const DTensorSpec*> specs_;
};

// Throws Error(unsupported) for an optimizer that works on all parameters at once, and would on their parts alone.
template <typename Fields>
void check_parts(const ParameterParts& parts) {
  if (!Fields::kOneState || parts.empty()) return;
  fail(ErrorCode::unsupported, "{} of parameters that ranks have parts of", Fields::kName);
}

// The functions of these names in tessera/state, which take ParameterParts(module), with others.
StateDict get_model_state_dict(const torch::nn::Module& module, const ParameterParts& parts);
IncompatibleKeys set_model_state_dict(torch::nn::Module& module, const StateDict& state_dict,
                                      const StateDictOptions& options, const ParameterParts& parts);
StateDict get_optimizer_state_dict(const torch::nn::Module& module, const torch::optim::Optimizer& optimizer,
                                   const ParameterParts& parts);
void set_optimizer_state_dict(const torch::nn::Module& module, torch::optim::Optimizer& optimizer,
                              const StateDict& state_dict, const OptimizerStateOptions& options,
                              const ParameterParts& parts);

}  // namespace tessera
