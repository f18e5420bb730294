// Units that a program gathers before they are called, and frees again.

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/runtime/op_observer.h"
#include "fsdp/runtime/runtime.h"
#include "tessera/base/error.h"
#include "tessera/base/function_ref.h"

namespace tessera::fsdp {

UnshardHandle::UnshardHandle(std::vector<FlatParamHandle*> handles, std::shared_ptr<const bool> alive)
    : handles_(std::move(handles)), alive_(std::move(alive)) {}

void UnshardHandle::wait() {
  const std::vector<FlatParamHandle*> handles = std::exchange(handles_, {});
  if (!alive_ || !*alive_) return;
  for (FlatParamHandle* handle : handles) handle->wait_unshard();
}

UnshardHandle Runtime::unshard(FunctionRef<std::vector<Unit*>()> find) {
  recover();
  if (in_backward_ || is_summoned) return {};
  const UnobservedOps unobserved;
  std::vector<Unit*> units;
  if (in_forward_) {
    units = find();
    for (const Unit* unit : units) check_order({unit, /*is_call=*/false});
  } else {
    check_call(
        "unshard",
        [&](CallArguments&) {
          units = find();
          for (const Unit* unit : units) unit->handle()->write_back_params();
        },
        [&](const Unit& unit, CallArguments& arguments) {
          if (std::find(units.begin(), units.end(), &unit) != units.end()) arguments.add("unit", unit.name());
        });
  }
  std::vector<FlatParamHandle*> handles;
  for (Unit* unit : units) {
    FlatParamHandle& handle = *unit->handle();
    if (!in_forward_) {
      if (unit->is_kept) handle.free_unsharded();  // the shard may have changed since
      unit->is_kept = !handle.is_gathered();
    }
    handle.start_unshard();
    handles.push_back(&handle);
  }
  return {std::move(handles), alive_};
}

UnshardHandle Runtime::unshard(const torch::nn::Module& module, bool recurse) {
  return unshard([&] { return units_of(module, recurse); });
}

UnshardHandle Runtime::unshard(Unit& unit) {
  if (unit.handle() == nullptr) return {};
  return unshard([&] { return std::vector<Unit*>{&unit}; });
}

void Runtime::reshard(const torch::nn::Module& module, bool recurse) {
  std::vector<Unit*> units;
  check_call(
      "reshard",
      [&](CallArguments&) {
        check_idle("reshard");
        units = units_of(module, recurse);
      },
      [&](const Unit& unit, CallArguments& arguments) {
        if (std::find(units.begin(), units.end(), &unit) != units.end()) arguments.add("unit", unit.name());
      });
  for (Unit* unit : units) {
    unit->is_kept = false;
    unit->handle()->free_unsharded();
  }
}

// Waits until all ranks that share memory with this one have come here, and no longer read the parameters in it, so
// that shards may be written to.
void Runtime::meet() {
  std::vector<std::string> met;  // groups
  for (const Unit* unit : units_) {
    const std::string& group = unit->handle()->group().name();
    if (std::find(met.begin(), met.end(), group) != met.end()) continue;
    if (unit->handle()->meet_after_reshard()) met.push_back(group);
  }
}

UnshardHandle Wrappable::unshard() { return unit_ != nullptr ? unit_->runtime().unshard(*unit_) : UnshardHandle(); }

UnshardHandle ShardedModule::unshard(const torch::nn::Module* module, bool recurse) {
  return runtime().unshard(module != nullptr ? *module : *module_ptr(), recurse);
}
void ShardedModule::reshard(const torch::nn::Module* module, bool recurse) {
  runtime().reshard(module != nullptr ? *module : *module_ptr(), recurse);
}

}  // namespace tessera::fsdp
