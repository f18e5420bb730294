#pragma once
/// \file
/// Which of a model's wrapped modules become units. PyTorch: torch/distributed/fsdp/wrap.py.

#include <torch/nn/module.h>

#include <cstdint>
#include <functional>

namespace tessera::fsdp {

/// Asked of every wrapped module, those within one before it. `numel` is how many elements the parameters have that
/// are in it and in no unit within it. Where it says no, the parameters belong to the next unit above.
using WrapPolicy = std::function<bool(const torch::nn::Module& module, std::int64_t numel)>;

/// Modules of one of these classes: `wrap_modules<BlockImpl, torch::nn::LinearImpl>()`. PyTorch: ModuleWrapPolicy.
template <typename... Impls>
WrapPolicy wrap_modules() {
  return [](const torch::nn::Module& module, std::int64_t) {
    return ((dynamic_cast<const Impls*>(&module) != nullptr) || ...);
  };
}

/// Modules with so many elements at least. PyTorch: size_based_auto_wrap_policy.
inline WrapPolicy wrap_larger_than(std::int64_t min_numel) {
  return [min_numel](const torch::nn::Module&, std::int64_t numel) { return numel >= min_numel; };
}

/// The model alone is one unit.
inline WrapPolicy wrap_none() {
  return [](const torch::nn::Module&, std::int64_t) { return false; };
}

}  // namespace tessera::fsdp
