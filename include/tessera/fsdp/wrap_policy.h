#pragma once
/// \file
/// Policies that select which modules of a model become units, and the options of each. PyTorch:
/// torch/distributed/fsdp/wrap.py.

#include <torch/nn/module.h>
#include <torch/nn/modules/container/moduledict.h>
#include <torch/nn/modules/container/modulelist.h>

#include <cstdint>
#include <functional>
#include <optional>

#include "tessera/comm/process_group.h"
#include "tessera/fsdp/options.h"

namespace tessera::fsdp {

/// Options of one unit. The model's `Options` apply where there is no value.
struct UnitOptions {
  /// Hybrid for all units of a model or for none: gradients are averaged over the same ranks.
  std::optional<ShardingStrategy> strategy = std::nullopt;
  /// Also of a module that `Options::keeps_full_precision` selects. `MixedPrecision()` keeps the parameters' dtype.
  std::optional<MixedPrecision> mixed_precision = std::nullopt;
  std::optional<bool> offload_params = std::nullopt;
  /// The ranks that shard the unit, a part of the model's group: for parameters that other ranks don't have, such as
  /// the experts of a mixture. Their names differ from those of the parameters on other ranks, and the gradients are
  /// averaged over these ranks only. Not with a hybrid strategy, nor in a tensor parallel model. PyTorch: process_group
  /// of a nested FullyShardedDataParallel.
  std::optional<ProcessGroup> group = std::nullopt;
};

/// The decision of a policy: whether a module becomes a unit, and its options. Converts from `bool` and `UnitOptions`.
class UnitChoice {
 public:
  UnitChoice(bool is_unit) : is_unit_(is_unit) {}                                // NOLINT(google-explicit-constructor)
  UnitChoice(const UnitOptions& options) : is_unit_(true), options_(options) {}  // NOLINT(google-explicit-constructor)
  bool is_unit() const { return is_unit_; }
  const UnitOptions& options() const { return options_; }

 private:
  bool is_unit_;
  UnitOptions options_;
};

/// Decides whether a module becomes a unit. Called for every module that has parameters which are not in a unit inside
/// it, inner modules before outer ones. `numel` is the number of elements of these parameters. If the policy returns
/// false, they belong to the next enclosing unit. The modules need not be held in a Wrap: the unit is then unsharded
/// from the first op that takes one of its parameters to the next op of another unit. PyTorch: CustomPolicy.
///
///     options.policy = [](const torch::nn::Module& module, std::int64_t) -> fsdp::UnitChoice {
///       if (module.as<HeadImpl>()) return fsdp::UnitOptions{.strategy = fsdp::ShardingStrategy::no_shard};
///       return module.as<BlockImpl>() != nullptr;
///     };
using WrapPolicy = std::function<UnitChoice(const torch::nn::Module& module, std::int64_t numel)>;

/// Selects modules of the given classes: `wrap_modules<BlockImpl, torch::nn::LinearImpl>()`. PyTorch: ModuleWrapPolicy.
template <typename... Impls>
WrapPolicy wrap_modules() {
  return [](const torch::nn::Module& module, std::int64_t) {
    return ((dynamic_cast<const Impls*>(&module) != nullptr) || ...);
  };
}

/// Selects modules with at least `min_numel` elements, except for containers without forward. PyTorch:
/// size_based_auto_wrap_policy.
inline WrapPolicy wrap_larger_than(std::int64_t min_numel) {
  return [min_numel](const torch::nn::Module& module, std::int64_t numel) {
    const bool is_container = dynamic_cast<const torch::nn::ModuleListImpl*>(&module) != nullptr ||
                              dynamic_cast<const torch::nn::ModuleDictImpl*>(&module) != nullptr;
    return numel >= min_numel && !is_container;
  };
}

/// Selects no module: the model is a single unit.
inline WrapPolicy wrap_none() {
  return [](const torch::nn::Module&, std::int64_t) { return false; };
}

}  // namespace tessera::fsdp
