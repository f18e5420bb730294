#include "tessera/checkpoint/global_save_plan.h"

#include "tessera/base/error.h"

namespace tessera::checkpoint {

SavePlan SavePlanner::create_local_plan(const FlatState& state) {
  SavePlan plan;
  for (std::uint32_t e = 0; e < state.size(); ++e) {
    const StateEntry& entry = state[e];
    const auto* tensor = std::get_if<StateTensor>(&entry.value);
    if (tensor == nullptr) {
      plan.add_object(plan.add_entry({entry.name, entry.path, false, {}, {}}), {e, 0});
      continue;
    }
    const std::uint32_t number = plan.add_entry({entry.name, entry.path, true, tensor->properties, tensor->shape});
    for (std::uint32_t c = 0; c < tensor->chunks.size(); ++c) plan.add_chunk(number, tensor->chunks[c].box, {e, c});
  }
  return plan;
}

GlobalSavePlan SavePlanner::create_global_plan(const GatheredPlans& plans) { return make_global_plan(plans); }

HostMemory SavePlanner::resolve_tensor(const FlatState& state, const SavePlan& plan, std::size_t item) {
  const SavePlan::Source source = plan[item].source;
  return std::get<StateTensor>(state.at(source.entry).value).chunks.at(source.chunk).memory();
}

Bytes SavePlanner::resolve_object(const FlatState& state, const SavePlan& plan, std::size_t item) {
  return std::get<StateObject>(state.at(plan[item].source.entry).value).archive();
}

}  // namespace tessera::checkpoint
