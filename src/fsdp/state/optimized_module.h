#pragma once
// The parameters that an optimizer of a sharded model works on, as a module whose state dicts are those of LibTorch's
// optimizers.

#include <torch/nn/module.h>

#include <map>
#include <memory>
#include <string>

#include "fsdp/state/sharded_params.h"

namespace tessera::fsdp {

// With use_orig_params this is the model itself, otherwise a module that contains the flat parameters and the
// parameters that are in none.
class OptimizedModule {
 public:
  explicit OptimizedModule(const Runtime& runtime);

  torch::nn::Module& module() const { return *module_; }
  const ShardedParams& params() const { return params_; }
  // The parts of all other parameters that are local tensors of DTensors.
  const ParameterParts& parts() const { return parts_; }

  // Converts a state by names in module() to one by names in the model. Sharded tensors become a FlatParamPart.
  StateDict to_parameters(const StateDict& optimized) const;
  // The inverse. `states` contains pieces of sharded parameters, and full tensors of others. If `strict`, adds
  // parameters whose flat parameter has a state and that have none to `problems`.
  StateDict to_optimized(const Dict& states, const List& groups, bool strict, Problems& problems) const;

 private:
  const std::string& name_of_other(const std::string& name) const;
  Dict flat_state_of(const FlatParamHandle& handle, const Dict& states, bool strict, Problems& problems) const;
  at::Tensor local_tensor(const FlatParamHandle& handle, std::size_t i, const Key& key, const Value& value) const;

  const Runtime& runtime_;
  ShardedParams params_;
  ParameterParts parts_;
  std::shared_ptr<torch::nn::Module> module_;
  std::map<std::string, FlatParamHandle*> flat_;  // by names in module_
  std::map<std::string, std::string> others_;     // names in the model, by names in module_
};

// Returns whether a value of the state of a parameter of this size has one element per element of the parameter.
bool is_elementwise(const Key& key, const Value& value, const std::vector<std::int64_t>& size);

}  // namespace tessera::fsdp
