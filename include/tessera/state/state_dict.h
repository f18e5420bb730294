#pragma once
/// \file
/// Gets and sets the state of a model and its optimizers in one call.
/// PyTorch: `get_state_dict` and `set_state_dict` in torch/distributed/checkpoint/state_dict.py.
///
///     const auto [model_state, optimizer_state] = get_state_dict(*model, {&optimizer});
///     set_state_dict(*model, {&optimizer}, model_state, optimizer_state);

#include <torch/nn/module.h>

#include <vector>

#include "tessera/state/module_state.h"
#include "tessera/state/optimizer_state.h"
#include "tessera/state/state_dict_options.h"
#include "tessera/state/value.h"

namespace tessera {

struct StateDicts {
  StateDict model;
  StateDict optimizer;  ///< of all optimizers
};

/// Returns what get_model_state_dict and get_optimizer_state_dict return, and throws as they do. A collective of
/// `options.group`.
StateDicts get_state_dict(const torch::nn::Module& module, const std::vector<torch::optim::Optimizer*>& optimizers,
                          const StateDictOptions& options = {});

/// Sets both states as set_model_state_dict and set_optimizer_state_dict do, and throws as they do. A collective of
/// `options.group`. Law: either the model and all optimizers are set, on all ranks, or nothing is changed.
IncompatibleKeys set_state_dict(torch::nn::Module& module, const std::vector<torch::optim::Optimizer*>& optimizers,
                                const StateDict& model_state, const StateDict& optimizer_state,
                                const StateDictOptions& options = {});

}  // namespace tessera
