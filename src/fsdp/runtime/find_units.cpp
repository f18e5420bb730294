#include "fsdp/runtime/find_units.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <set>

#include "fsdp/groups.h"
#include "fsdp/runtime/initialize.h"
#include "fsdp/runtime/runtime.h"
#include "tessera/base/error.h"

namespace tessera::fsdp {

namespace {

std::string to_text(std::vector<int> ranks) {
  std::sort(ranks.begin(), ranks.end());
  return fmt::format("{}", fmt::join(ranks, ", "));
}

// Returns the ranks of a unit's group. A group of one rank, which may be ProcessGroup(), has this rank.
std::vector<int> ranks_of(const FoundUnit& unit, const ProcessGroup& model_group) {
  return unit.group.size() == 1 ? std::vector<int>{model_group.world_rank()} : unit.group.world_ranks();
}

bool lowers_precision(const MixedPrecision& mixed) { return mixed.param_dtype || mixed.buffer_dtype; }

class Search {
 public:
  Search(const ProcessGroup& group, const Options& options) : group_(group), options_(options) {
    for (const auto& module : options.ignored_modules) {
      if (!module) fail(ErrorCode::invalid_argument, "ignored_modules contains null, expected modules");
      ignored_roots_.insert(module.get());
      for (const auto& inner : module->modules()) ignored_modules_.insert(inner.get());
      for (const at::Tensor& param : module->parameters()) {  // other modules may share them
        if (param.defined() && !FlatParamHandle::has(param)) ignored_params_.insert(param.unsafeGetTensorImpl());
      }
    }
    for (const at::Tensor& param : options.ignored_parameters) {
      if (!param.defined()) {
        fail(ErrorCode::invalid_argument, "ignored_parameters contains an undefined tensor, expected parameters");
      }
      ignored_params_.insert(param.unsafeGetTensorImpl());
    }
  }

  std::vector<FoundUnit> run(torch::nn::Module& model) {
    FoundUnit root = visit(model, "", "", Place::root);
    root.module = &model;
    check_free(root);
    units_.insert(units_.begin(), std::move(root));
    check_once();
    return std::move(units_);
  }

 private:
  // `undivided`: within a module that the policy does not divide.
  enum class Place : std::uint8_t { root, divided, undivided };

  // Adds the units inside `module`. Returns the parameters and modules left for the enclosing unit.
  FoundUnit visit(torch::nn::Module& module, const std::string& name, const std::string& prefix, Place place) {
    FoundUnit own;
    own.name = name;
    if (ignored_modules_.count(&module) != 0) {
      visit_ignored(module, name, prefix);
      return own;
    }
    Runtime* const sharded = place == Place::root ? nullptr : Runtime::of(module);
    if (sharded != nullptr) return take(*sharded, name, prefix);
    for (const auto& param : module.named_parameters(/*recurse=*/false)) {
      const at::Tensor& tensor = param.value();
      if (!tensor.defined()) continue;
      if (ignored_params_.count(tensor.unsafeGetTensorImpl()) != 0) {
        if (FlatParamHandle::has(tensor)) refuse_sharded("ignored parameter", prefix + param.key());
        continue;
      }
      own.params.push_back({prefix + param.key(), tensor});
    }
    const bool divides = place != Place::undivided && (!options_.policy || options_.policy.divides(module));
    for (const auto& child : module.named_children()) {
      const std::string child_name = prefix + child.key();
      FoundUnit rest = visit(*child.value(), child_name, child_name + ".", divides ? Place::divided : Place::undivided);
      own.params.insert(own.params.end(), rest.params.begin(), rest.params.end());
      own.modules.insert(own.modules.end(), rest.modules.begin(), rest.modules.end());
    }
    own.modules.push_back(&module);
    own.module = &module;
    if (place == Place::root) set_options(own, {});
    if (place == Place::root || own.params.empty()) return own;
    const UnitChoice choice = place == Place::undivided ? UnitChoice(false) : choose(own);
    if (!choice.is_unit() && !keeps_full_precision(module, options_)) return own;
    set_options(own, choice.options());
    check_free(own);
    add(std::move(own));
    return FoundUnit{};
  }

  UnitChoice choose(const FoundUnit& unit) const {
    return options_.policy ? options_.policy(*unit.module, numel_of(unit))
                           : UnitChoice(dynamic_cast<Wrappable*>(unit.module) != nullptr);
  }

  void set_options(FoundUnit& unit, const UnitOptions& own) const {
    unit.strategy = own.strategy.value_or(options_.strategy);
    unit.offload_params = own.offload_params.value_or(options_.offload_params);
    unit.mixed_precision = keeps_full_precision(*unit.module, options_)
                               ? own.mixed_precision.value_or(MixedPrecision())
                               : own.mixed_precision.value_or(options_.mixed_precision);
    unit.group = own.group.value_or(group_);
    check_group(unit, own.group.has_value());
    if (lowers_precision(options_.mixed_precision) || !lowers_precision(unit.mixed_precision)) return;
    for (const torch::nn::Module* module : unit.modules) {
      if (module == unit.module || !options_.keeps_full_precision || !options_.keeps_full_precision(*module)) continue;
      fail(ErrorCode::invalid_argument,
           "unit '{}' has mixed precision and contains a {}, which keeps full precision, expected mixed precision in "
           "the model's options, or a policy that selects this module with UnitOptions::mixed_precision",
           printable(unit.name), module->name());
    }
  }

  void check_group(const FoundUnit& unit, bool is_own) const {
    if (is_hybrid(unit.strategy) ? !is_hybrid(options_.strategy) : is_hybrid(options_.strategy) && !is_own) {
      fail(
          ErrorCode::invalid_argument,
          "the strategy of unit '{}' is {} and that of the model {}, expected a hybrid strategy for both, or for none, "
          "or for the model and UnitOptions::group with all ranks that have the model",
          printable(unit.name), strategy_name(unit.strategy), strategy_name(options_.strategy));
    }
    if (!is_own) return;
    if (is_hybrid(unit.strategy)) {
      fail(ErrorCode::unsupported, "unit '{}' has a group and strategy {}, expected a strategy that is not hybrid",
           printable(unit.name), strategy_name(unit.strategy));
    }
    const std::vector<int> ranks = ranks_of(unit, group_);
    if (is_hybrid(options_.strategy)) return check_has_all_ranks(unit, ranks);
    if (const std::vector<int>& all = group_.world_ranks(); !contains(all, ranks)) {
      fail(ErrorCode::invalid_argument,
           "the group of unit '{}' has the ranks {} and that of the model {}, expected ranks of the model's group",
           printable(unit.name), to_text(ranks), to_text(all));
    }
  }

  // For a unit of a model with replicas.
  void check_has_all_ranks(const FoundUnit& unit, const std::vector<int>& ranks) const {
    const std::vector<int>&shards = group_.world_ranks(), &replicas = options_.replicas->world_ranks();
    if (contains(ranks, shards) && contains(ranks, replicas) && ranks.size() == shards.size() * replicas.size()) return;
    fail(
        ErrorCode::invalid_argument,
        "the group of unit '{}' has the ranks {}, the model is sharded over the ranks {} and has replicas on the ranks "
        "{}, expected a group of all {} ranks",
        printable(unit.name), to_text(ranks), to_text(shards), to_text(replicas), shards.size() * replicas.size());
  }

  // Adds the units of `inner`, a model inside this one. Returns its modules that are in no unit.
  FoundUnit take(Runtime& inner, const std::string& name, const std::string& prefix) {
    check_can_be_taken(inner, name);
    std::map<const Unit*, std::vector<torch::nn::Module*>> modules;
    for (const auto& module : inner.module()->modules()) {
      if (const Unit* unit = inner.unit_of(*module)) modules[unit].push_back(module.get());
    }
    std::vector<Unit*> units = inner.units();
    if (!units.empty() && units[0] == &inner.root()) std::rotate(units.begin(), units.begin() + 1, units.end());
    for (Unit* unit : units) {
      const FlatParamHandle& handle = *unit->handle();
      FoundUnit taken;
      taken.name = unit->name().empty() ? name : prefix + unit->name();
      taken.module = &unit->module();
      for (std::size_t i = 0; i < handle.params().size(); ++i) {
        taken.params.push_back({prefix + handle.layout().params()[i].fqn, handle.params()[i]});
      }
      for (const SharedParamInfo& shared : handle.layout().shared_params()) {
        taken.params.push_back({prefix + shared.fqn, handle.params()[shared.primary]});
      }
      taken.modules = std::move(modules[unit]);
      taken.sharded = unit;
      taken.prefix = prefix;
      taken.strategy = handle.options().strategy;
      taken.mixed_precision = handle.options().mixed_precision;
      taken.offload_params = handle.options().offload_params;
      taken.group = handle.group();
      check_taken(taken);
      units_.push_back(std::move(taken));
    }
    FoundUnit rest;
    rest.name = name;
    if (inner.root().handle() == nullptr) rest.modules = std::move(modules[&inner.root()]);
    return rest;
  }

  void check_can_be_taken(Runtime& inner, const std::string& name) {
    const auto expect = [&](bool is_so, std::string_view found, std::string_view expected) {
      if (is_so) return;
      fail(ErrorCode::invalid_argument, "the sharded module '{}' in this model {}, expected {}", printable(name), found,
           expected);
    };
    inner.recover();
    expect(inner.is_idle() && !inner.is_summoned, "is in forward, backward or summon_full_params", "none of these");
    expect(inner.syncs_gradients, "is under no_sync", "that it is not");
    expect(!inner.post_reduce_hook, "has a hook after reductions", "it on this model: remove it");
    expect(inner.options().use_orig_params == options_.use_orig_params, "has another use_orig_params", "one for both");
    expect(taken_.insert(&inner).second, "has two names", "one: shard this model alone");
  }

  void check_taken(const FoundUnit& unit) const {
    const std::optional<ProcessGroup>& replicas = unit.sharded->handle()->options().replicas;
    if (is_hybrid(unit.strategy) && (replicas != options_.replicas || unit.group != group_)) {
      fail(ErrorCode::invalid_argument,
           "unit '{}' is sharded already with strategy {}, expected the groups of shards and of replicas of this model",
           printable(unit.name), strategy_name(unit.strategy));
    }
    check_group(unit, unit.group != group_);
    for (const NamedParameter& param : unit.params) {
      if (ignored_params_.count(param.parameter.unsafeGetTensorImpl()) != 0) {
        refuse_sharded("ignored parameter", param.fqn);
      }
    }
  }

  static bool contains(const std::vector<int>& all, const std::vector<int>& ranks) {
    return std::all_of(ranks.begin(), ranks.end(),
                       [&](int rank) { return std::find(all.begin(), all.end(), rank) != all.end(); });
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

  [[noreturn]] static void refuse_sharded(std::string_view what, const std::string& name) {
    fail(ErrorCode::invalid_argument,
         "{} '{}' is sharded already, expected it in one FullyShardedDataParallel, or that the model contains "
         "everything "
         "that the other one shards",
         what, printable(name));
  }

  static bool is_unit(torch::nn::Module& module) {
    const auto* const wrappable = dynamic_cast<Wrappable*>(&module);
    return wrappable != nullptr && wrappable->unit() != nullptr;
  }

  static void check_free(const FoundUnit& unit) {
    const auto is_sharded = [](const NamedParameter& param) { return FlatParamHandle::has(param.parameter); };
    if (is_unit(*unit.module) || std::any_of(unit.params.begin(), unit.params.end(), is_sharded)) {
      refuse_sharded("module", unit.name);
    }
    for (const NamedParameter& param : unit.params) {
      if (!FlatParamHandle::is_left_over(param.parameter)) continue;
      fail(ErrorCode::invalid_argument,
           "parameter '{}' is a shard of a FullyShardedDataParallel that was destroyed, expected the full parameter: "
           "keep that object, or load its full state dict into a new model",
           printable(param.fqn));
    }
  }

  // An ignored module is called, saved and clipped as it is: its parameters must be full ones. Sharded models inside it
  // keep their units.
  void visit_ignored(torch::nn::Module& module, const std::string& name, const std::string& prefix) {
    if (Runtime* const sharded = Runtime::of(module); sharded != nullptr && ignored_roots_.count(&module) == 0) {
      take(*sharded, name, prefix);
      return;
    }
    const std::vector<at::Tensor> params = module.parameters(/*recurse=*/false);
    if (is_unit(module) || std::any_of(params.begin(), params.end(), &FlatParamHandle::has)) {
      refuse_sharded("ignored module", name);
    }
    for (const auto& child : module.named_children()) {
      const std::string child_name = prefix + child.key();
      visit_ignored(*child.value(), child_name, child_name + ".");
    }
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

  const ProcessGroup& group_;
  const Options& options_;
  std::set<const torch::nn::Module*> ignored_roots_, ignored_modules_;  // without and with what is inside
  std::set<const Runtime*> taken_;
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

std::vector<FoundUnit> find_units(torch::nn::Module& model, const ProcessGroup& group, const Options& options) {
  return Search(group, options).run(model);
}

void check_one_device(const std::vector<FoundUnit>& units, const Options& options) {
  const FoundUnit* first = nullptr;  // with parameters, which have a device
  for (const FoundUnit& unit : units) {
    if (unit.params.empty()) continue;
    if (first == nullptr) first = &unit;
    const at::Device expected = device_of(*first, options), found = device_of(unit, options);
    if (found == expected) continue;
    fail(ErrorCode::invalid_argument,
         "unit '{}' is on {} and unit '{}' on {}, expected one device for all units: set Options::device",
         printable(unit.name), found.str(), printable(first->name), expected.str());
  }
}

std::vector<ProcessGroup> own_groups(const std::vector<FoundUnit>& units, const ProcessGroup& group) {
  std::vector<ProcessGroup> groups;
  for (const FoundUnit& unit : units) {
    if (unit.group == group || std::find(groups.begin(), groups.end(), unit.group) != groups.end()) continue;
    groups.push_back(unit.group);
  }
  return groups;
}

OwnGroupParams check_own_groups(const std::vector<FoundUnit>& units, const ProcessGroup& group) {
  std::vector<std::string>
      mine;  // three per parameter: its name, the ranks of its group, and those that are in `group`
  for (const FoundUnit& unit : units) {
    if (unit.group == group) continue;
    const std::vector<int> ranks = ranks_of(unit, group);
    std::vector<int> here = ranks;
    std::erase_if(here, [&](int rank) {
      return std::find(group.world_ranks().begin(), group.world_ranks().end(), rank) == group.world_ranks().end();
    });
    for (const NamedParameter& param : unit.params) {
      mine.insert(mine.end(), {param.fqn, to_text(ranks), to_text(here)});
    }
  }
  struct Owners {
    std::string ranks, here;
    std::vector<int> found;
  };
  std::map<std::string, Owners> owners;
  std::string why;
  const std::vector<std::vector<std::string>> all = all_gather_texts(group, mine);
  for (std::size_t i = 0; i < all.size(); ++i) {
    const int rank = group.world_ranks()[i];
    for (std::size_t k = 0; k + 2 < all[i].size(); k += 3) {
      const std::string &name = all[i][k], &ranks = all[i][k + 1], &here = all[i][k + 2];
      Owners& known = owners.try_emplace(name, Owners{ranks, here, {}}).first->second;
      known.found.push_back(rank);
      if (known.ranks == ranks || !why.empty()) continue;
      why = fmt::format(
          "parameter '{}' is sharded over ranks {} on rank {} and over ranks {} on rank {}, expected one group: give "
          "parameters that differ between ranks different names",
          printable(name), known.ranks, known.found.front(), ranks, rank);
    }
  }
  OwnGroupParams params;
  for (const auto& [name, known] : owners) {
    params.names.insert(name);
    params.are_on_all_ranks = params.are_on_all_ranks && known.found.size() == all.size();
    const std::string found = to_text(known.found);
    if (found == known.here || !why.empty()) continue;
    why = fmt::format(
        "parameter '{}' has a group of ranks {} in its unit's options on ranks {}, expected it on all of the group's "
        "ranks",
        printable(name), known.ranks, found);
  }
  group.agree_on("shard a model", [&] {
    if (!why.empty()) throw Error(ErrorCode::invalid_argument, why);
  });
  return params;
}

}  // namespace tessera::fsdp
