#pragma once
/// \file
/// Hooks on the tensors that autograd saves for backward, and activations that are kept on the CPU until then.
///
///     {
///       const fsdp::SavedTensorHooks on_cpu(fsdp::save_on_cpu());  // in forward
///       y = block(x);
///     }
///     fsdp::Wrap<fsdp::Offloaded<Block>> unit{64};                    // every call of a unit
///     fsdp::Offloaded<fsdp::Checkpointed<Block>> block{64};           // keeps the inputs of a checkpoint on the CPU
///
/// Law: results and gradients equal those without hooks bit for bit if each hook returns the tensor that it was given.
///
/// LibTorch asks the autograd engine for hooks. The first use replaces the engine of the process with one that
/// otherwise behaves the same, so it throws `Error(unsupported)` in a process that already has another one, such as
/// Python's. PyTorch: torch.autograd.graph.saved_tensors_hooks, save_on_cpu; offload_wrapper.

#include <ATen/core/Tensor.h>
#include <torch/nn/pimpl.h>

#include <functional>
#include <utility>

namespace tessera::fsdp {

/// A hook that is called for each tensor that autograd saves. Returns the function that backward calls, maybe more than
/// once, to get an equal tensor of the same device. It must not keep `saved` itself, which may own the graph: keep
/// `saved.detach()`.
using PackHook = std::function<std::function<at::Tensor()>(const at::Tensor& saved)>;

/// A scope in which autograd passes each tensor that this thread saves to a hook. The innermost one applies. Backward
/// runs later, so what it saves itself is not included. Destroy in the reverse order of construction.
class SavedTensorHooks {
 public:
  /// Throws `Error(invalid_argument)` if `pack` is null, `Error(unsupported)` if autograd has an engine of another
  /// kind.
  explicit SavedTensorHooks(PackHook pack);
  ~SavedTensorHooks();
  SavedTensorHooks(const SavedTensorHooks&) = delete;
  SavedTensorHooks& operator=(const SavedTensorHooks&) = delete;
};

/// Returns a hook that copies tensors of other devices to the CPU, and back in backward. With `pin_memory` the copies
/// are pinned where the device supports it. Parameters and views of them stay where they are, since they exist anyway;
/// those of a sharded model are gathered again for backward. Frozen parameters that are in no sharded model are copied
/// like other tensors.
PackHook save_on_cpu(bool pin_memory = true);

template <typename Impl, typename Forward = decltype(&Impl::forward)>
class OffloadedImpl;

/// A module whose forward saves its activations with save_on_cpu. As with WrapImpl, `forward` must be a single
/// function.
template <typename Impl, typename Class, typename Result, typename... Args>
class OffloadedImpl<Impl, Result (Class::*)(Args...)> : public Impl {
 public:
  using Impl::Impl;
  Result forward(Args... arguments) {
    const SavedTensorHooks hooks(save_on_cpu());
    return Impl::forward(std::forward<Args>(arguments)...);
  }
};

template <typename Impl, typename Class, typename Result, typename... Args>
class OffloadedImpl<Impl, Result (Class::*)(Args...) const> : public OffloadedImpl<Impl, Result (Class::*)(Args...)> {
 public:
  using OffloadedImpl<Impl, Result (Class::*)(Args...)>::OffloadedImpl;
};

/// The holder of a module whose activations are kept on the CPU. Its constructor takes the arguments of the module's
/// own holder.
template <typename Module>
class Offloaded : public torch::nn::ModuleHolder<OffloadedImpl<typename Module::ContainedType>> {
 public:
  using torch::nn::ModuleHolder<OffloadedImpl<typename Module::ContainedType>>::ModuleHolder;
};

}  // namespace tessera::fsdp
