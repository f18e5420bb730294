#pragma once
/// \file
/// The state of an optimizer by the names of its parameters, as PyTorch has it, and loading it back.
/// PyTorch: `get_optimizer_state_dict` and `set_optimizer_state_dict` in torch/distributed/checkpoint/state_dict.py;
/// Python's classes of the same names in torch/optim.
///
///     {"state": {"layer.weight": {"step": tensor(3.), "exp_avg": ..., "exp_avg_sq": ...}, ...},
///      "param_groups": [{"lr": 0.001, "betas": (0.9, 0.999), ..., "params": ["layer.weight", ...]}, ...]}
///
/// Known are LibTorch's SGD, Adam, AdamW, Adagrad, RMSprop and LBFGS, and classes derived from them; another is
/// `Error(unsupported)`. Keys and types are those of Python's class in PyTorch 2.14, which older ones load too: an
/// option that C++ hasn't has the value that means "as C++ does it", and a step is a float32 scalar on the CPU (a
/// float64 one where float32 would round it).
///
/// A checkpoint of an older PyTorch, whose optimizer has fewer options, lacks those of "param_groups" that came later:
/// load it with `rules.allow_partial`, and look at LoadReport::missing.
///
/// A parameter that more than one name leads to is called by the first (Module's order, see module_state.h), and found
/// under any. A parameter of the optimizer that isn't in the module is `Error(invalid_argument)`, naming group and
/// position.

#include <torch/nn/module.h>

#include <functional>

#include "tessera/state/module_state.h"
#include "tessera/state/value.h"

namespace torch::optim {
class Optimizer;
}

namespace tessera {

/// The tensors are the optimizer's own, detached: what is written to one is written to the optimizer. Numbers are
/// copies, the steps included. The state of a parameter that is the local tensor of a DTensor is DTensors, too; but
/// LBFGS of such is `Error(unsupported)`.
///
/// A parameter that requires grad and has no state yet gets the one that it would begin with (step 0 and zeros), so
/// that what was saved can be loaded into it; the optimizer is not changed. So does PyTorch, but that it takes a step
/// to make that state and counts it. Law: to set what was got changes nothing that can be seen, but for SGD with
/// dampening, whose very first step is undampened unless there is a momentum. LBFGS has one state, under its first
/// parameter, and none before its first step.
StateDict get_optimizer_state_dict(const torch::nn::Module& module, const torch::optim::Optimizer& optimizer);

struct OptimizerStateOptions {
  /// Whether a missing state of a parameter, and options and keys that nobody knows, are errors.
  bool strict = true;
  /// Takes tensors over where dtype and device fit, rather than copy them: for a state that nobody else needs, which
  /// the state that was got from another optimizer is not.
  bool take_tensors = false;
  /// As StateDictOptions::confirm.
  std::function<void()> confirm = nullptr;
};

/// Gives the optimizer the state and the options of `state_dict`. Tensors are converted to a floating-point parameter's
/// dtype, and brought to its device. What the state has of other parameters is not looked at, so it may be that of
/// several optimizers. It may also have numbers for names (Python's `optimizer.state_dict()`): then groups and
/// parameters are taken in order, and must be as many.
///
/// Law: either all is set or nothing is changed. The optimizer shares no memory with `state_dict` afterwards, unless it
/// is told to take its tensors.
///
/// A state that has none for any parameter is that of an optimizer before its first step, and makes this one such. If
/// it has some, a parameter that requires grad and isn't among them is an error if strict, else begins anew.
///
/// Throws one error that names everything that is wrong, by parameter or group, and key. `Error(invalid_argument)`:
/// missing names, keys and options, tensors of another shape, values of other kinds, parameters of one group that are
/// in several of the state's. `Error(unsupported)` if it is only that: options that change the result and that C++
/// hasn't (maximize, or decoupled_weight_decay for Adam; False is fine) and, if strict, options that nobody knows.
/// Known and without effect here are foreach, fused, capturable, differentiable, param_names and what schedulers add
/// (initial_lr, max_lr, min_lr, base_momentum, max_momentum, swa_lr).
void set_optimizer_state_dict(const torch::nn::Module& module, torch::optim::Optimizer& optimizer,
                              const StateDict& state_dict, const OptimizerStateOptions& options = {});

}  // namespace tessera
