#pragma once
// The parts of getting and setting state dicts that do not communicate. Callers agree between them and the change.

#include <torch/nn/module.h>

#include <functional>
#include <string>
#include <vector>

#include "tessera/state/internal/parameter_parts.h"
#include "tessera/state/module_state.h"
#include "tessera/state/optimizer_state.h"

namespace tessera {

// Returns the names of the submodules that the options select, each followed by a dot, or "" for the module itself.
// Throws Error(invalid_argument) for one that is not in the module.
std::vector<std::string> submodule_prefixes(const torch::nn::Module& module, const StateDictOptions& options);

// As the public functions, on this rank only. Values are neither gathered nor moved. `parts` describes the parameters
// that are local tensors of DTensors.
StateDict local_model_state(const torch::nn::Module& module, const ParameterParts& parts,
                            const StateDictOptions& options = {});
StateDict local_optimizer_state(const torch::nn::Module& module, const torch::optim::Optimizer& optimizer,
                                const ParameterParts& parts);

struct ModelStatePlan {
  IncompatibleKeys incompatible;
  std::function<void()> set;  // makes the change
};
// Makes all checks of set_model_state_dict and changes nothing.
ModelStatePlan plan_model_state(const torch::nn::Module& module, const StateDict& state_dict,
                                const ParameterParts& parts, const StateDictOptions& options = {});
// Makes all checks of set_optimizer_state_dict and changes nothing. Returns the function that makes the change.
std::function<void()> plan_optimizer_state(const torch::nn::Module& module, torch::optim::Optimizer& optimizer,
                                           const StateDict& state_dict, const ParameterParts& parts,
                                           const StateDictOptions& options = {});

}  // namespace tessera
