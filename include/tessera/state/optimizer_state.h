#pragma once
/// \file
/// Gets and sets the state of an optimizer by parameter name, in PyTorch's form.
/// PyTorch: `get_optimizer_state_dict` and `set_optimizer_state_dict` in torch/distributed/checkpoint/state_dict.py;
/// Python's classes of the same names in torch/optim.
///
///     {"state": {"layer.weight": {"step": tensor(3.), "exp_avg": ..., "exp_avg_sq": ...}, ...},
///      "param_groups": [{"lr": 0.001, "betas": (0.9, 0.999), ..., "params": ["layer.weight", ...]}, ...]}
///
/// Flattened (StateDictOptions::flatten_optimizer_state_dict), the state of each parameter and the options of its group
/// are entries of their own, which ranks with different parameters, as in a pipeline, save under different names.
/// Groups without parameters are left out, and keep their options when the state dict is set. LBFGS cannot be
/// flattened: `Error(unsupported)`.
///
///     {"state.layer.weight.step": tensor(3.), ..., "param_groups.layer.weight.lr": 0.001, ...}
///
/// Supports LibTorch's SGD, Adam, AdamW, Adagrad, RMSprop and LBFGS and classes derived from them; throws
/// `Error(unsupported)` for other optimizers. Keys and types are those of the Python class in PyTorch 2.14; older
/// versions load them too. An option that C++ does not have gets the value that describes what C++ does. A step is a
/// float32 scalar on the CPU, or a float64 scalar if float32 would round it.
///
/// A checkpoint of an older PyTorch lacks the options that were added to "param_groups" later. Load it with
/// `rules.allow_partial` and check LoadReport::missing.
///
/// A parameter with several names is saved under the first one, in the module's order (see module_state.h), and found
/// under any of them. Throws `Error(invalid_argument)` naming group and position if a parameter of the optimizer is not
/// in the module.

#include <torch/nn/module.h>

#include <cstdint>
#include <vector>

#include "tessera/state/module_state.h"
#include "tessera/state/state_dict_options.h"
#include "tessera/state/value.h"

namespace torch::optim {
class Optimizer;
}

namespace tessera {

/// Returns the state of the optimizer, or of several in one state dict. The tensors are the optimizer's own, detached;
/// they share memory with it, except those that are gathered or moved. Numbers are copies, including the steps. If a
/// parameter is the local tensor of a DTensor, its state consists of DTensors too, or with `full_state_dict` of full
/// tensors; LBFGS with such parameters throws `Error(unsupported)`. A collective of `options.group`. Throws as
/// gather_state_dict.
///
/// A parameter that requires grad and has no state yet gets its initial state in the result (step 0 and zeros), so that
/// a checkpoint can be loaded into it; the optimizer is not changed. PyTorch instead takes a step to create that state,
/// and counts it. LBFGS has one state, under its first parameter, and none before its first step.
///
/// Law: setting the returned state has no visible effect, except for SGD with dampening: its first step is not dampened
/// unless a momentum buffer exists.
StateDict get_optimizer_state_dict(const torch::nn::Module& module, const torch::optim::Optimizer& optimizer,
                                   const StateDictOptions& options = {});
StateDict get_optimizer_state_dict(const torch::nn::Module& module,
                                   const std::vector<torch::optim::Optimizer*>& optimizers,
                                   const StateDictOptions& options = {});

/// Sets the state and the options of the optimizer, or of several, from `state_dict`, nested or flattened. Tensors are
/// converted to the dtype of the parameter if it is a floating-point one, and moved to its device. A collective of
/// `options.group`. State of other parameters is ignored, so `state_dict` may hold the state of several optimizers.
/// Instead of names it may have numbers, as Python's `optimizer.state_dict()` does; groups and parameters then match by
/// position, and their counts must be equal. The keys of `state` may be texts of numbers, as read from a checkpoint.
///
/// Law: either everything is set, on all ranks, or nothing is changed. The optimizer shares no memory with `state_dict`
/// afterwards, unless `take_tensors` is set.
///
/// A state dict without state for any parameter of an optimizer resets the optimizer to what it is before its first
/// step, unless the state dict has state of a parameter that none of its own groups lists. Otherwise, a parameter that
/// requires grad and has no state is an error if `strict`, and starts without state if not.
///
/// Throws one error that lists all problems by parameter or group, and key. It is `Error(invalid_argument)` for missing
/// names, keys and options, tensors of another shape, values of other kinds, and parameters of one group that belong to
/// several groups of `state_dict`, or have different options in a flattened one. It is `Error(unsupported)` if the only
/// problems are options that change the result and that C++ does not have (maximize, or decoupled_weight_decay for
/// Adam; False is accepted) and, if `strict`, unknown options. These options are accepted and have no effect: foreach,
/// fused, capturable, differentiable, param_names and those that schedulers add (initial_lr, max_lr, min_lr,
/// base_momentum, max_momentum, swa_lr).
void set_optimizer_state_dict(const torch::nn::Module& module, torch::optim::Optimizer& optimizer,
                              const StateDict& state_dict, const StateDictOptions& options = {});
void set_optimizer_state_dict(const torch::nn::Module& module, const std::vector<torch::optim::Optimizer*>& optimizers,
                              const StateDict& state_dict, const StateDictOptions& options = {});

/// How an optimizer's state dict names parameters. PyTorch: OptimStateKeyType.
enum class OptimStateKeyType : std::uint8_t {
  param_name,  ///< by name in the module
  param_id,    ///< by number, as Python's `optimizer.state_dict()` does
};

/// Returns an optimizer's nested state dict with names of parameters instead of numbers, or the reverse. With names,
/// that of a Python optimizer can be loaded into a model with other groups or into a sharded one. With numbers, that of
/// a sharded model can be loaded into a Python optimizer. Numbers count the parameters of `optimizer`, group by group,
/// or without one the parameters of the module, each once. A state dict that has such keys already is returned as it
/// is. `state_dict` may lack "param_groups". Values are not changed, and share memory with those of `state_dict`.
///
/// Throws `Error(invalid_argument)` naming the key for a name or number that no parameter has, for names and numbers in
/// one state dict, for two keys of one parameter, and if the groups do not have as many parameters as the numbers
/// count. PyTorch: FullyShardedDataParallel.rekey_optim_state_dict.
StateDict rekey_optim_state_dict(const StateDict& state_dict, OptimStateKeyType type, const torch::nn::Module& module,
                                 const torch::optim::Optimizer* optimizer = nullptr);

}  // namespace tessera
