#include <fmt/format.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cli/command.h"
#include "cli/json_text.h"
#include "cli/text_table.h"
#include "tessera/base/bytes.h"
#include "tessera/base/error.h"
#include "tessera/checkpoint/planning_cost.h"

namespace tessera::cli {
namespace {

using checkpoint::PlannedState;
using checkpoint::PlanningCost;

struct Flags {
  PlannedState state;
  std::string sharding = "0";
  bool json = false;
};

PlannedState state_of(const Flags& flags) {
  PlannedState state = flags.state;
  if (flags.sharding == "replicated") {
    state.sharding = PlannedState::Sharding::replicated;
    return state;
  }
  std::size_t used = 0;
  try {
    state.dim = std::stoll(flags.sharding, &used);
  } catch (const std::exception&) {
    used = 0;
  }
  if (used == 0 || used != flags.sharding.size()) {
    throw UsageError(fmt::format("--shard: '{}', expected a dimension or 'replicated'", one_line(flags.sharding)));
  }
  return state;
}

void print_for_people(Session& session, const PlannedState& state, const PlanningCost& cost) {
  session.out.print(
      "{} ranks, {} tensors of {}, {}: {} items, {} stored\n\n", state.ranks, state.tensors,
      shape_to_string(state.shape),
      state.sharding == PlannedState::Sharding::cut ? fmt::format("cut in dimension {}", state.dim) : "replicated",
      cost.items, cost.stored);
  TextTable table({{"PHASE"}, {"WHERE"}, {"SECONDS", TextTable::Align::right}, {"BYTES", TextTable::Align::right}});
  const auto seconds = [](double value) { return fmt::format("{:.3f}", value); };
  table.add({"local plan", "each rank", seconds(cost.local_plan),
             format_bytes(cost.gathered_bytes / static_cast<std::uint64_t>(state.ranks)) + " sent"});
  table.add({"gather", "all to rank 0", "", format_bytes(cost.gathered_bytes)});
  table.add({"global plan", "rank 0", seconds(cost.global_plan), ""});
  table.add({"scatter", "rank 0 to all", "", format_bytes(cost.scattered_bytes)});
  table.add({"placement", "rank 0", seconds(cost.placement), ""});
  table.add({"metadata", "rank 0", seconds(cost.metadata_write), format_bytes(cost.metadata_bytes)});
  table.print(session.out);
  session.out.print("\nrank 0 takes {} s and {} at most\n", seconds(cost.coordinator()),
                    format_bytes(cost.peak_memory_bytes));
}

void print_as_json(Session& session, const PlanningCost& cost) {
  const nlohmann::ordered_json json = {{"items", cost.items},
                                       {"stored", cost.stored},
                                       {"local_plan_s", cost.local_plan},
                                       {"global_plan_s", cost.global_plan},
                                       {"placement_s", cost.placement},
                                       {"metadata_write_s", cost.metadata_write},
                                       {"coordinator_s", cost.coordinator()},
                                       {"gathered_bytes", cost.gathered_bytes},
                                       {"scattered_bytes", cost.scattered_bytes},
                                       {"metadata_bytes", cost.metadata_bytes},
                                       {"peak_memory_bytes", cost.peak_memory_bytes}};
  session.out.print("{}\n", json_text(json, 2));
}

ExitStatus plan(const Flags& flags, Session& session) {
  const PlannedState state = state_of(flags);
  const PlanningCost cost = checkpoint::measure_planning(state, &session.cancellation);
  if (flags.json) {
    print_as_json(session, cost);
  } else {
    print_for_people(session, state, cost);
  }
  return kYes;
}

}  // namespace

Command add_plan(CLI::App& parent) {
  auto flags = std::make_shared<Flags>();
  CLI::App* app = parent.add_subcommand("plan", "Measure what planning a save costs at a scale without its machines");
  app->add_option("--ranks", flags->state.ranks, "Ranks that save together")->required();
  app->add_option("--tensors", flags->state.tensors, "Tensors of the state")->required();
  app->add_option("--shape", flags->state.shape, "Shape of each tensor (8192,8192)")
      ->delimiter(',')
      ->expected(1, 16)
      ->type_name("N,N,...");
  app->add_option("--shard", flags->sharding, "Dimension in which tensors are cut, or 'replicated' (0)")
      ->type_name("DIM");
  app->add_option("--files", flags->state.files_per_rank, "Files of each rank; 0 for one for each item (1)");
  add_json_flag(*app, flags->json);
  app->footer(
      "Makes the plans of all ranks in this process, without a tensor, and runs on them what rank 0 of\n"
      "such a job runs.\n\n"
      "Example:\n"
      "  tessera plan --ranks 1024 --tensors 1024");
  return {app, [flags](Session& session) { return plan(*flags, session); }};
}

}  // namespace tessera::cli
