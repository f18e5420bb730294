#pragma once
/// \file
/// Initial values of a model that was constructed on meta.
///
///     fsdp::Options options;
///     options.param_init_fn = fsdp::reset_parameters<BlockImpl>();  // BlockImpl has a function reset_parameters()
///
/// LibTorch's Module has no virtual `reset_parameters`, but each of LibTorch's layers has one, which its constructor
/// calls. Without `Options::param_init_fn` a FullyShardedDataParallel initializes these layers with it: Linear,
/// Bilinear, Embedding, EmbeddingBag, convolutions, batch, instance, layer and group norms, recurrent modules and
/// cells, MultiheadAttention, and PReLU. Any other module with parameters or buffers of its own on meta needs
/// `param_init_fn`, even if its class derives from a layer and adds some. The inner modules are initialized before the
/// one that contains them, as by constructors.
///
/// Law: the values have the distribution of those that constructors give without MetaInit. They are equal on ranks that
/// have the same seed (`torch::manual_seed`), and those of rank 0 with `Options::sync_module_states`. If a model is one
/// unit and its constructors draw random numbers only in `reset_parameters`, the values are those of one process with
/// the same seed. If the `out_proj` of a MultiheadAttention is a unit of its own, its bias has the values of a Linear,
/// in place of 0. PyTorch: param_init_fn=None of FullyShardedDataParallel.

#include <torch/nn/module.h>

#include <functional>
#include <type_traits>

namespace tessera::fsdp {

namespace detail {

using ResetFunction = void (*)(torch::nn::Module& module);

/// Returns the function that initializes the parameters and buffers of a layer of LibTorch. Returns null for another
/// module, and for a class derived from a layer that has others.
ResetFunction libtorch_reset(const torch::nn::Module& module);

[[noreturn]] void refuse_to_reset(const torch::nn::Module& module);

template <typename Module>
struct ImplOf {
  using Type = Module;
};
template <typename Module>
requires requires { typename Module::ContainedType; }
struct ImplOf<Module> {
  using Type = typename Module::ContainedType;
};

template <typename Impl>
bool reset_as(torch::nn::Module& module) {
  auto* const found = dynamic_cast<Impl*>(&module);
  if (found != nullptr) found->reset_parameters();
  return found != nullptr;
}

}  // namespace detail

/// Returns a function for Options::param_init_fn. It calls `reset_parameters()` of modules of the given classes, of
/// classes that derive from them, and of LibTorch's layers, and throws `Error(invalid_argument)` for any other module.
/// A class may also be named by its holder.
template <typename... Modules>
std::function<void(torch::nn::Module& module)> reset_parameters() {
  return [](torch::nn::Module& module) {
    if ((detail::reset_as<typename detail::ImplOf<Modules>::Type>(module) || ...)) return;
    const detail::ResetFunction reset = detail::libtorch_reset(module);
    if (reset == nullptr) detail::refuse_to_reset(module);
    reset(module);
  };
}

}  // namespace tessera::fsdp
