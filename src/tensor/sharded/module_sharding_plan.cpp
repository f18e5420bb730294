#include "tessera/tensor/sharded/module_sharding_plan.h"

#include <algorithm>
#include <set>
#include <span>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/comm/internal/step.h"

namespace tessera {

namespace {

using ModulePtr = std::shared_ptr<torch::nn::Module>;

// Returns the submodule `name`, of which the root has no shared pointer. Throws Error(invalid_argument) if there is
// none. `what` of the plan names it.
ModulePtr submodule_of(torch::nn::Module& root, const std::string& name, const char* what) {
  torch::nn::Module* at = &root;
  ModulePtr found;
  for (std::size_t begin = 0; begin <= name.size() && !name.empty();) {
    const std::size_t end = std::min(name.find('.', begin), name.size());
    const auto children = at->named_children();
    const ModulePtr* child = children.find(name.substr(begin, end - begin));
    if (child == nullptr) {
      fail(ErrorCode::invalid_argument, "{} of the plan names '{}', expected a submodule of {}", what, printable(name),
           root.name());
    }
    found = *child;
    at = found.get();
    begin = end + 1;
  }
  return found;
}

bool is_within(const std::string& name, const std::string& module) {
  return name.starts_with(module) && (name.size() == module.size() || name[module.size()] == '.');
}

// Returns whether a sharder of the plan shards the module `name`, or a module that contains it.
bool is_within_sharded(const std::string& name, const ModuleShardingPlan& plan) {
  return std::any_of(plan.sharders.begin(), plan.sharders.end(),
                     [&](const auto& each) { return is_within(name, each.first); });
}

std::pair<std::string, std::string> parent_and_last(const std::string& name) {
  const std::size_t dot = name.rfind('.');
  return dot == std::string::npos ? std::pair{std::string(), name}
                                  : std::pair{name.substr(0, dot), name.substr(dot + 1)};
}

void check_sharders(torch::nn::Module& root, const ModuleShardingPlan& plan, CallArguments& arguments) {
  for (const auto& [name, sharder] : plan.sharders) {
    if (name.empty()) {
      fail(ErrorCode::invalid_argument, "a sharder of the plan has the name '', expected that of a submodule");
    }
    if (sharder == nullptr) {
      fail(ErrorCode::invalid_argument, "the sharder of '{}' is null, expected a sharder", printable(name));
    }
    arguments.add("sharder", fmt::format("'{}' {}", printable(name), submodule_of(root, name, "sharders")->name()));
    for (const auto& [parameter, spec] : plan.parameters) {
      if (!is_within(parameter, name)) continue;
      fail(ErrorCode::invalid_argument,
           "the plan has a spec for '{}' and a sharder for '{}', expected no parameter of a module with a sharder",
           printable(parameter), printable(name));
    }
  }
}

// Throws on all ranks if a sharder throws on any.
void call_sharders(torch::nn::Module& root, const ModuleShardingPlan& plan, const ProcessGroup& group) {
  for (const auto& [name, sharder] : plan.sharders) {
    comm::in_step(std::span(&group, 1), "sharder of '" + name + "'", [&, name = name, sharder = sharder] {
      const ModulePtr module = submodule_of(root, name, "sharders");
      const ModulePtr result = sharder->shard(name, module, group);
      const auto [parent_name, last] = parent_and_last(name);
      const ModulePtr parent = submodule_of(root, parent_name, "sharders");
      auto* holder = dynamic_cast<ReplaceableSubmodules*>(parent ? parent.get() : &root);
      group.check_call("replace a module by that of its sharder", [&](CallArguments& arguments) {
        if (result == nullptr) {
          fail(ErrorCode::invalid_argument, "the sharder of '{}' returned null, expected a module", printable(name));
        }
        arguments.add("module", result->name()).add("replaced", result != module);
        if (result != module && holder == nullptr) {
          fail(ErrorCode::invalid_argument,
               "the sharder of '{}' returned another module, and its parent {} is not a ReplaceableSubmodules, "
               "expected the same module or a parent that is one",
               printable(name), parent ? parent->name() : root.name());
        }
      });
      if (result != module) holder->replace_submodule(last, result);
      group.check_call("replaced a module", [](CallArguments&) {});
    });
  }
}

}  // namespace

// The planned results of modules, complete before a module changes. A sharder may replace any module, so this is made
// again after the sharders.
class OutputPlanner {
 public:
  // Before the sharders, leaves out the modules that they shard.
  OutputPlanner(torch::nn::Module& root, const ModuleShardingPlan& plan, bool after_sharders,
                CallArguments& arguments) {
    const auto is_left_out = [&](const std::string& name) { return !after_sharders && is_within_sharded(name, plan); };
    for (const auto& [name, spec] : plan.output_plan) {
      if (spec == nullptr) {
        fail(ErrorCode::invalid_argument, "the output_plan of '{}' is null, expected a sharding spec", printable(name));
      }
      arguments.add("output_plan", fmt::format("'{}' {}", printable(name), comparable_text(*spec)));
      if (is_left_out(name)) continue;
      PlannedOutput::Plan& planned = plan_of(root, name, "output_plan");
      if (planned.spec != nullptr) {
        fail(ErrorCode::invalid_argument, "output_plan has two names of the module '{}', expected each module once",
             printable(name));
      }
      planned.spec = spec;
    }
    for (const std::string& name : plan.return_local_tensor) {
      arguments.add("return_local_tensor", name);
      if (!is_left_out(name)) plan_of(root, name, "return_local_tensor").is_local = true;
    }
  }

  void apply() {
    for (auto& [module, plan] : plans_) module->plan_ = std::move(plan);
  }

 private:
  PlannedOutput::Plan& plan_of(torch::nn::Module& root, const std::string& name, const char* what) {
    const ModulePtr found = submodule_of(root, name, what);
    torch::nn::Module& module = found ? *found : root;
    auto* planned = dynamic_cast<PlannedOutput*>(&module);
    if (planned == nullptr) {
      fail(ErrorCode::invalid_argument, "{} of the plan names '{}', which is {}, expected one of PlannedOutput", what,
           printable(name), module.name());
    }
    if (planned->has_output_plan()) {
      fail(ErrorCode::invalid_argument,
           "{} of the plan names '{}', whose result has a plan already, expected a module without one", what,
           printable(name));
    }
    return plans_[planned];
  }

  std::map<PlannedOutput*, PlannedOutput::Plan> plans_;
};

ModuleOutput PlannedOutput::planned_output(const ops::LinearResult& result) const {
  const ProcessGroup& group =
      std::visit([](const auto& each) -> const ProcessGroup& { return each.process_group(); }, result);
  return comm::in_step(std::span(&group, 1), "forward of a module with a planned result", [&]() -> ModuleOutput {
    std::optional<ShardedTensor> sharded;
    if (const auto* tensor = std::get_if<ShardedTensor>(&result)) {
      sharded = *tensor;
      if (plan_.spec != nullptr) sharded->reshard(plan_.spec);
    } else if (plan_.spec != nullptr) {
      sharded = std::get<PartialTensor>(result).reshard(plan_.spec);
    }
    if (!sharded) return std::get<PartialTensor>(result);
    if (!plan_.is_local) return *sharded;
    const at::Tensor& local = sharded->local_tensor();
    const auto* chunks = dynamic_cast<const ChunkShardingSpec*>(&sharded->sharding_spec());
    return chunks != nullptr && local.dim() > 0 && local.size(chunks->dim()) == 1 ? local.squeeze(chunks->dim())
                                                                                  : local;
  });
}

void shard_module(torch::nn::Module& module, const ModuleShardingPlan& plan, const ProcessGroup& group, int src) {
  std::optional<OutputPlanner> outputs;
  group.check_call("shard a module by a plan", [&](CallArguments& arguments) {
    check_sharders(module, plan, arguments);
    outputs.emplace(module, plan, /*after_sharders=*/false, arguments);
    arguments.add("src", src);
  });
  shard_module(module, plan.parameters, group, src);
  if (!plan.sharders.empty()) {
    call_sharders(module, plan, group);
    group.check_call("plan the results of a module", [&](CallArguments& arguments) {
      outputs.emplace(module, plan, /*after_sharders=*/true, arguments);
    });
  }
  outputs->apply();
}

}  // namespace tessera
