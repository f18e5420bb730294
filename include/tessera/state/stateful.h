#pragma once
/// \file
/// An object with a state, as a value of a state dict that is saved and loaded.
///
///     StateDict state{{"model", stateful_model(model.ptr())},
///                     {"optim", stateful_optimizer(model.ptr(), {&optimizer})},
///                     {"step", 0}};
///     tessera::load(state, "checkpoints/1", group);  // sets the model and the optimizer
///     train();
///     tessera::save(state, "checkpoints/2", group);
///
/// A Stateful may be a value of the state dict or of a dict in it, not of a list or a tuple. Saving calls `state_dict`
/// and saves what it returns in its place. Loading calls `state_dict`, loads into what it returns and calls
/// `load_state_dict` with it; the Stateful stays in the state dict. All ranks must have the same ones under the same
/// names. They are called one after another in the order of the state dict, so their functions may be collectives. If
/// one throws on any rank, every rank throws an error naming it. A function that communicates must not throw on some
/// ranks only; those of tessera do not.
///
/// PyTorch: torch/distributed/checkpoint/stateful.py, which supports values of the outermost dict only.

#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <vector>

#include "tessera/comm/process_group.h"
#include "tessera/state/state_dict_options.h"
#include "tessera/state/value.h"

namespace torch::optim {
class Optimizer;
}

namespace tessera {

class Stateful {
 public:
  virtual ~Stateful() = default;

  /// Returns the state. Tensors may share memory with the object. A state to load must have the same names and shapes
  /// of tensors.
  virtual StateDict state_dict() = 0;
  /// Sets the state: what state_dict returned, with loaded values.
  virtual void load_state_dict(const StateDict& state_dict) = 0;

 protected:
  Stateful() = default;
  Stateful(const Stateful&) = default;
  Stateful& operator=(const Stateful&) = default;
};

/// Returns a Stateful whose functions are `get` and `set`. For a model that FSDP shards:
///
///     stateful([&] { return model.state_dict(); }, [&](const StateDict& state) { model.load_state_dict(state); })
///
/// Throws `Error(invalid_argument)` if one of them is null.
std::shared_ptr<Stateful> stateful(std::function<StateDict()> get, std::function<void(const StateDict&)> set);
/// Returns a Stateful that calls get_ and set_model_state_dict. It keeps the module alive.
std::shared_ptr<Stateful> stateful_model(std::shared_ptr<torch::nn::Module> module, StateDictOptions options = {});
/// Returns a Stateful that calls get_ and set_optimizer_state_dict. It keeps the module alive; the optimizers must
/// outlive it.
std::shared_ptr<Stateful> stateful_optimizer(std::shared_ptr<torch::nn::Module> module,
                                             std::vector<torch::optim::Optimizer*> optimizers,
                                             StateDictOptions options = {});
/// Returns a Stateful of this rank's random generators, that of the CPU and those of `devices`, so that a run that
/// resumes draws the numbers that it would have drawn:
///
///     {"random", stateful_random(group, {device})}
///
/// A checkpoint has the generators of each rank under its number, each named by its type of device and its number among
/// `devices` of that type ("cuda0"): a rank may resume on another device. On fewer ranks, the generators of the others
/// are not used; on more ranks, load with `allow_partial`, which leaves those of the additional ranks as they are. Its
/// functions do not communicate; they may wait for a device. Ranks that are threads of one process share the CPU's
/// generator. Throws `Error(invalid_argument)` if a device is the CPU or given twice, and LibTorch's error for a device
/// that has no generator. PyTorch: torch.get_rng_state and torch.cuda.get_rng_state, which programs save by themselves.
std::shared_ptr<Stateful> stateful_random(const ProcessGroup& group = {}, const std::vector<at::Device>& devices = {});

}  // namespace tessera
