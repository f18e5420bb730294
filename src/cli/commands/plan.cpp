#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cli/session.h"
#include "cli/text/json_text.h"
#include "cli/text/text_table.h"
#include "tessera/base/bytes.h"
#include "tessera/base/error.h"
#include "tessera/checkpoint/planning_cost.h"
#include "tessera/checkpoint/report_json.h"

namespace tessera::cli {
namespace {

using checkpoint::PlannedState;
using checkpoint::PlanningCost;

struct PlanFlags {
  PlannedState state;
  std::string sharding = "0";
  std::int64_t files_per_rank = 1;
  bool json = false, large = false;
};

// A measurement holds the plans of all ranks. Of this many items it takes some 13 GB and minutes.
constexpr double kMaxItems = 1e8;
constexpr double kBytesPerItem = 130;
// What measure_planning accepts.
constexpr Range kCounts{1, 1 << 24};
// One file may have all tensors, of float32, and what their archives add. Offsets in it are below 2^63.
constexpr double kMaxStateBytes = 0x1p62;

void check_scale(const PlanFlags& flags) {
  double state_bytes = 4.0 * static_cast<double>(flags.state.tensors);
  for (const std::int64_t size : flags.state.shape) state_bytes *= static_cast<double>(size);
  if (state_bytes > kMaxStateBytes) {
    throw UsageError(fmt::format("--shape: {} of {} have {:.1e} bytes, expected at most {:.1e}",
                                 counted(static_cast<std::size_t>(flags.state.tensors), "tensor"),
                                 shape_to_string(flags.state.shape), state_bytes, kMaxStateBytes));
  }
  const double items = static_cast<double>(flags.state.ranks) * static_cast<double>(flags.state.tensors);
  if (items <= kMaxItems || flags.large) return;
  const double bytes = std::min(items * kBytesPerItem, 9e18);
  throw UsageError(
      fmt::format("{:.1e} items take about {} of memory to measure, expected at most {:.0e} items; --large "
                  "measures them all the same",
                  items, format_bytes(static_cast<std::uint64_t>(bytes)), kMaxItems));
}

PlannedState state_of(const PlanFlags& flags) {
  PlannedState state = flags.state;
  state.files_per_rank = static_cast<std::size_t>(flags.files_per_rank);
  if (flags.sharding == "replicated") {
    state.sharding = PlannedState::Sharding::replicated;
    return state;
  }
  const auto dims = static_cast<std::int64_t>(state.shape.size());
  std::size_t used = 0;
  try {
    state.dim = std::stoll(flags.sharding, &used);
  } catch (const std::exception&) {
    used = 0;
  }
  if (used == 0 || used != flags.sharding.size() || state.dim < -dims || state.dim >= dims) {
    throw UsageError(fmt::format("--shard: '{}', expected a dimension from {} to {} or 'replicated'",
                                 one_line(flags.sharding), -dims, dims - 1));
  }
  return state;
}

void print_for_people(Session& session, const PlannedState& state, const PlanningCost& cost) {
  session.out.print("{} ranks, {} tensors of {}, {}: {} items, {} stored\n\n", state.ranks, state.tensors,
                    shape_to_string(state.shape),
                    state.sharding == PlannedState::Sharding::replicated
                        ? "replicated"
                        : fmt::format("sharded in dimension {}", state.dim),
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
  session.out.print("\nrank 0 takes {} s and at most {} of memory\n", seconds(cost.coordinator()),
                    format_bytes(cost.peak_memory_bytes));
}

void print_as_json(Session& session, const PlanningCost& cost) {
  const nlohmann::ordered_json json = {{"schema", checkpoint::json_schema("plan")},
                                       {"items", cost.items},
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

ExitStatus plan(const PlanFlags& flags, Session& session) {
  const PlannedState state = state_of(flags);
  check_scale(flags);
  const PlanningCost cost = checkpoint::measure_planning(state, &session.cancellation);
  if (flags.json) {
    print_as_json(session, cost);
  } else {
    print_for_people(session, state, cost);
  }
  return kYes;
}

}  // namespace

Command plan_command() {
  const auto flags = std::make_shared<PlanFlags>();
  return {.name = "plan",
          .summary = "Measure the cost of planning a save at any scale, on this machine.",
          .details =
              "Makes the plans of all ranks in this process, without tensors, and runs on them what rank 0 of "
              "such a job runs.",
          .examples = {"tessera plan --ranks 1024 --tensors 1024"},
          .options = {{.name = "ranks",
                       .value_name = "N",
                       .help = "Number of ranks that save together",
                       .target = &flags->state.ranks,
                       .required = true,
                       .range = kCounts},
                      {.name = "tensors",
                       .value_name = "N",
                       .help = "Number of tensors of the state",
                       .target = &flags->state.tensors,
                       .required = true,
                       .range = kCounts},
                      {.name = "shape",
                       .value_name = "N,N,...",
                       .help = "Shape of each tensor",
                       .target = &flags->state.shape,
                       .default_text = "8192,8192",
                       .range = Range{1, std::numeric_limits<std::int64_t>::max()},
                       .max_count = 16},
                      {.name = "shard",
                       .value_name = "DIM",
                       .help = "Dimension in which tensors are sharded, or 'replicated'",
                       .target = &flags->sharding,
                       .default_text = "0"},
                      {.name = "files",
                       .value_name = "N",
                       .help = "Number of files of each rank; 0 for one per item",
                       .target = &flags->files_per_rank,
                       .default_text = "1",
                       .range = Range{0, 1 << 20}},
                      {.name = "large",
                       .help = "Measure more than 100 million items, which takes much memory and time",
                       .target = &flags->large},
                      json_option(flags->json)},
          .run = [flags](Session& session) { return plan(*flags, session); }};
}

}  // namespace tessera::cli
