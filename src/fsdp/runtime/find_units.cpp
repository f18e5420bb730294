#include "fsdp/runtime/find_units.h"

#include <algorithm>
#include <map>
#include <set>

#include "tessera/base/error.h"

namespace tessera::fsdp {

namespace {

bool lowers_precision(const MixedPrecision& mixed) { return mixed.param_dtype || mixed.buffer_dtype; }

class Search {
 public:
  explicit Search(const Options& options) : options_(options) {
    for (const auto& module : options.ignored_modules) {
      if (!module) fail(ErrorCode::invalid_argument, "ignored_modules contains null, expected modules");
      for (const auto& inner : module->modules()) ignored_modules_.insert(inner.get());
    }
    for (const at::Tensor& param : options.ignored_parameters) {
      if (!param.defined()) {
        fail(ErrorCode::invalid_argument, "ignored_parameters contains an undefined tensor, expected parameters");
      }
      ignored_params_.insert(param.unsafeGetTensorImpl());
    }
  }

  std::vector<FoundUnit> run(torch::nn::Module& model) {
    FoundUnit root = visit(model, "", "", /*is_root=*/true);
    root.module = &model;
    check_free(root);
    units_.insert(units_.begin(), std::move(root));
    check_once();
    return std::move(units_);
  }

 private:
  // Adds the units inside `module`. Returns the parameters and modules left for the enclosing unit.
  FoundUnit visit(torch::nn::Module& module, const std::string& name, const std::string& prefix, bool is_root) {
    FoundUnit own;
    own.name = name;
    if (ignored_modules_.count(&module) != 0) return own;
    own.modules.push_back(&module);
    for (const auto& param : module.named_parameters(/*recurse=*/false)) {
      const at::Tensor& tensor = param.value();
      if (!tensor.defined() || ignored_params_.count(tensor.unsafeGetTensorImpl()) != 0) continue;
      own.params.push_back({prefix + param.key(), tensor});
    }
    for (const auto& child : module.named_children()) {
      const std::string child_name = prefix + child.key();
      FoundUnit rest = visit(*child.value(), child_name, child_name + ".", /*is_root=*/false);
      own.params.insert(own.params.end(), rest.params.begin(), rest.params.end());
      own.modules.insert(own.modules.end(), rest.modules.begin(), rest.modules.end());
    }
    own.module = &module;
    if (is_root) set_options(own, {});
    if (is_root || own.params.empty()) return own;
    const UnitChoice choice = choose(own);
    if (!choice.is_unit() && !keeps_full_precision(module, options_)) return own;
    set_options(own, choice.options());
    check_free(own);
    add(std::move(own));
    return FoundUnit{};
  }

  UnitChoice choose(const FoundUnit& unit) const {
    return options_.policy ? options_.policy(*unit.module, numel_of(unit)) : UnitChoice(unit.wrappable() != nullptr);
  }

  void set_options(FoundUnit& unit, const UnitOptions& own) const {
    unit.strategy = own.strategy.value_or(options_.strategy);
    unit.offload_params = own.offload_params.value_or(options_.offload_params);
    unit.mixed_precision = keeps_full_precision(*unit.module, options_)
                               ? own.mixed_precision.value_or(MixedPrecision())
                               : own.mixed_precision.value_or(options_.mixed_precision);
    if (is_hybrid(unit.strategy) != is_hybrid(options_.strategy)) {
      fail(ErrorCode::invalid_argument,
           "the strategy of unit '{}' is {} and that of the model {}, expected a hybrid strategy for all units or none",
           printable(unit.name), strategy_name(unit.strategy), strategy_name(options_.strategy));
    }
    if (lowers_precision(options_.mixed_precision) || !lowers_precision(unit.mixed_precision)) return;
    for (const torch::nn::Module* module : unit.modules) {
      if (module == unit.module || !options_.keeps_full_precision || !options_.keeps_full_precision(*module)) continue;
      fail(ErrorCode::invalid_argument,
           "unit '{}' has mixed precision and contains a {}, which keeps full precision, expected mixed precision in "
           "the model's options, or a policy that selects this module with UnitOptions::mixed_precision",
           printable(unit.name), module->name());
    }
  }

  // A module that the model contains under two names is one unit.
  void add(FoundUnit unit) {
    const auto same =
        std::find_if(units_.begin(), units_.end(), [&](const auto& u) { return u.module == unit.module; });
    if (same == units_.end()) {
      units_.push_back(std::move(unit));
    } else {
      same->params.insert(same->params.end(), unit.params.begin(), unit.params.end());
    }
  }

  static std::int64_t numel_of(const FoundUnit& unit) {
    std::set<const void*> seen;
    std::int64_t numel = 0;
    for (const NamedParameter& param : unit.params) {
      if (seen.insert(param.parameter.unsafeGetTensorImpl()).second) numel += param.parameter.numel();
    }
    return numel;
  }

  static void check_free(const FoundUnit& unit) {
    const auto is_sharded = [](const NamedParameter& param) { return FlatParamHandle::has(param.parameter); };
    const bool is_unit = unit.wrappable() != nullptr && unit.wrappable()->unit() != nullptr;
    if (!is_unit && std::none_of(unit.params.begin(), unit.params.end(), is_sharded)) return;
    fail(ErrorCode::invalid_argument,
         "module '{}' is sharded already, expected it in one FullyShardedDataParallel only", printable(unit.name));
  }

  void check_once() const {
    std::map<const void*, std::pair<const FoundUnit*, std::string>> where;
    for (const FoundUnit& unit : units_) {
      for (const NamedParameter& param : unit.params) {
        const auto [found, is_new] =
            where.try_emplace(param.parameter.unsafeGetTensorImpl(), std::make_pair(&unit, param.fqn));
        if (is_new || found->second.first == &unit) continue;
        fail(ErrorCode::invalid_argument,
             "parameter '{}' of unit '{}' is also '{}' of unit '{}', expected it in one unit: exclude both modules "
             "from the policy, so that the parameter belongs to the unit that contains them",
             printable(found->second.second), printable(found->second.first->name), printable(param.fqn),
             printable(unit.name));
      }
    }
  }

  const Options& options_;
  std::set<const torch::nn::Module*> ignored_modules_;
  std::set<const void*> ignored_params_;
  std::vector<FoundUnit> units_;
};

}  // namespace

std::string_view strategy_name(ShardingStrategy strategy) {
  switch (strategy) {
    case ShardingStrategy::full_shard:
      return "full_shard";
    case ShardingStrategy::shard_grad_op:
      return "shard_grad_op";
    case ShardingStrategy::no_shard:
      return "no_shard";
    case ShardingStrategy::hybrid_shard:
      return "hybrid_shard";
    case ShardingStrategy::hybrid_shard_zero2:
      return "hybrid_shard_zero2";
  }
  return "unknown";
}

bool keeps_full_precision(const torch::nn::Module& module, const Options& options) {
  return lowers_precision(options.mixed_precision) && options.keeps_full_precision &&
         options.keeps_full_precision(module);
}

std::vector<FoundUnit> find_units(torch::nn::Module& model, const Options& options) {
  return Search(options).run(model);
}

}  // namespace tessera::fsdp
