#pragma once
/// \file
/// Policies that select which wrapped modules of a model become units. PyTorch: torch/distributed/fsdp/wrap.py.

#include <torch/nn/module.h>

#include <cstdint>
#include <functional>

namespace tessera::fsdp {

/// Returns whether a module becomes a unit. Called for every wrapped module, inner modules before outer ones. `numel`
/// is the number of elements of the module's parameters that are not in a unit inside it. If the policy returns false,
/// these parameters belong to the next enclosing unit.
using WrapPolicy = std::function<bool(const torch::nn::Module& module, std::int64_t numel)>;

/// Selects modules of the given classes: `wrap_modules<BlockImpl, torch::nn::LinearImpl>()`. PyTorch: ModuleWrapPolicy.
template <typename... Impls>
WrapPolicy wrap_modules() {
  return [](const torch::nn::Module& module, std::int64_t) {
    return ((dynamic_cast<const Impls*>(&module) != nullptr) || ...);
  };
}

/// Selects modules with at least `min_numel` elements. PyTorch: size_based_auto_wrap_policy.
inline WrapPolicy wrap_larger_than(std::int64_t min_numel) {
  return [min_numel](const torch::nn::Module&, std::int64_t numel) { return numel >= min_numel; };
}

/// Selects no module: the model is a single unit.
inline WrapPolicy wrap_none() {
  return [](const torch::nn::Module&, std::int64_t) { return false; };
}

}  // namespace tessera::fsdp
