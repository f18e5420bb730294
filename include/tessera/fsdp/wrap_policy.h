#pragma once
/// \file
/// Policies that select which modules of a model become units, and the options of each. PyTorch:
/// torch/distributed/fsdp/wrap.py.

#include <torch/nn/module.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <type_traits>
#include <utility>

#include "tessera/comm/process_group.h"
#include "tessera/fsdp/options.h"

namespace tessera::fsdp {

using ModulePredicate = std::function<bool(const torch::nn::Module& module)>;

/// Options of one unit. The model's `Options` apply where there is no value.
struct UnitOptions {
  /// Must be hybrid if the model's strategy is and the unit has no `group`, and must not be hybrid otherwise.
  std::optional<ShardingStrategy> strategy = std::nullopt;
  /// Also applies to a module that `Options::keeps_full_precision` selects. `MixedPrecision()` keeps the parameters'
  /// dtype.
  std::optional<MixedPrecision> mixed_precision = std::nullopt;
  std::optional<bool> offload_params = std::nullopt;
  /// The ranks that shard the unit, a part of the model's group: for parameters that other ranks do not have, such as
  /// the experts of a mixture. Their names differ from those of the parameters on other ranks, and the gradients are
  /// averaged over these ranks only. In a model with a hybrid strategy it is instead a group of all ranks that have the
  /// model, over all of which this unit is sharded. Not for a unit with a hybrid strategy, nor in a tensor parallel
  /// model. PyTorch: process_group of a nested FullyShardedDataParallel.
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

/// A policy that decides whether a module becomes a unit. `choose` is called for every module that has parameters which
/// are not in a unit inside it, inner modules before outer ones. `numel` is the number of elements of these parameters.
/// If it returns false, they belong to the next enclosing unit. The modules need not be held in a Wrap: the unit is
/// then unsharded from the first op that takes one of its parameters to the next op of another unit. PyTorch:
/// CustomPolicy.
///
///     options.policy = [](const torch::nn::Module& module, std::int64_t) -> fsdp::UnitChoice {
///       if (module.as<HeadImpl>()) return fsdp::UnitOptions{.strategy = fsdp::ShardingStrategy::no_shard};
///       return module.as<BlockImpl>() != nullptr;
///     };
class WrapPolicy {
 public:
  WrapPolicy(std::nullptr_t = nullptr) {}  // NOLINT(google-explicit-constructor)
  /// `choose` is not called for modules inside one that `undivided` selects.
  template <typename Choose>  // NOLINTNEXTLINE(google-explicit-constructor)
  requires std::is_invocable_r_v<UnitChoice, Choose&, const torch::nn::Module&, std::int64_t> WrapPolicy(
      Choose choose, ModulePredicate undivided = nullptr)
      : choose_(std::move(choose)), undivided_(std::move(undivided)) {}

  /// Returns false for null.
  explicit operator bool() const { return choose_ != nullptr; }
  UnitChoice operator()(const torch::nn::Module& module, std::int64_t numel) const { return choose_(module, numel); }
  /// Returns whether the policy is asked about the modules inside `module`.
  bool divides(const torch::nn::Module& module) const { return !undivided_ || !undivided_(module); }

 private:
  std::function<UnitChoice(const torch::nn::Module& module, std::int64_t numel)> choose_;
  ModulePredicate undivided_;
};

/// Returns whether a module is of one of the given classes: `is_any_of<BlockImpl, torch::nn::LinearImpl>`.
template <typename... Impls>
bool is_any_of(const torch::nn::Module& module) {
  return ((dynamic_cast<const Impls*>(&module) != nullptr) || ...);
}

/// Selects modules of the given classes: `wrap_modules<BlockImpl, torch::nn::LinearImpl>()`. PyTorch: ModuleWrapPolicy.
template <typename... Impls>
WrapPolicy wrap_modules() {
  return [](const torch::nn::Module& module, std::int64_t) { return is_any_of<Impls...>(module); };
}

/// Return whether a module is a MultiheadAttention, and whether it is a container without forward.
bool is_multihead_attention(const torch::nn::Module& module);
bool is_container(const torch::nn::Module& module);

/// Selects modules with at least `min_numel` elements, except for those that `excluded` selects and those inside a
/// module that `undivided` selects. Null selects none. PyTorch: size_based_auto_wrap_policy.
WrapPolicy wrap_larger_than(std::int64_t min_numel, ModulePredicate undivided = is_multihead_attention,
                            ModulePredicate excluded = is_container);

/// Selects no module: the model is a single unit.
inline WrapPolicy wrap_none() {
  return [](const torch::nn::Module&, std::int64_t) { return false; };
}

}  // namespace tessera::fsdp
