#include "tessera/checkpoint/planning_cost.h"

#include <algorithm>
#include <chrono>

#include "checkpoint/save/files.h"
#include "checkpoint/save/item_layouts.h"
#include "tessera/base/error.h"
#include "tessera/base/internal/process_memory.h"
#include "tessera/checkpoint/global_save_plan.h"
#include "tessera/checkpoint/sidecar.h"
#include "tessera/layout/sharding.h"

namespace tessera::checkpoint {
namespace {

class Stopwatch {
 public:
  double seconds() const { return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count(); }

 private:
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

void check(const PlannedState& state) {
  const auto check_range = [](std::string_view what, std::int64_t found, std::int64_t most) {
    if (found >= 1 && found <= most) return;
    fail(ErrorCode::invalid_argument, "plan: {} {}, expected 1 to {}", what, found, most);
  };
  constexpr std::int64_t kMost = 1 << 24;
  check_range("ranks", state.ranks, kMost);
  check_range("tensors", state.tensors, kMost);
  for (const std::int64_t size : state.shape) check_range("a size of", size, INT64_MAX);
}

class Planning {
 public:
  Planning(const PlannedState& state, const Cancellation* cancellation) : state_(state), cancellation_(cancellation) {
    if (state.sharding == PlannedState::Sharding::sharded) boxes_ = chunk_boxes(state.shape, state.dim, state.ranks);
  }

  PlanningCost measure() {
    const GatheredPlans plans = gather();
    cost_.gathered_bytes = plans.size_bytes();
    SavePlanner planner;
    const Stopwatch merging;
    GlobalSavePlan global = planner.create_global_plan(plans);
    cost_.global_plan = merging.seconds();
    check_cancelled();
    const Stopwatch placing;
    for (std::size_t r = 0; r < global.written.size(); ++r) {
      cost_.stored += global.written[r].size();
      cost_.scattered_bytes += (load_little_endian<std::uint64_t>(plans.items(r).data()) + 7) / 8;
      place_rank(global, r, state_.files_per_rank, {}, 0, 0);
    }
    cost_.placement = placing.seconds();
    check_cancelled();
    const Stopwatch writing;
    FileSums sums;
    dcp::write(global.metadata, [&](ByteView bytes) { sums.add(bytes); });
    cost_.metadata_bytes = sums.size_bytes();
    cost_.metadata_write = writing.seconds();
    cost_.peak_memory_bytes = status_bytes("VmHWM") - std::min(status_bytes("VmHWM"), before_bytes_);
    return cost_;
  }

 private:
  void check_cancelled() const {
    if (cancellation_ != nullptr) cancellation_->check();
  }

  std::string name_of(std::int64_t tensor) const {
    return fmt::format("model.layers.{}.block.{}.weight", tensor / 8, tensor % 8);
  }

  void plan_of(std::int64_t rank) {
    FlatState state;
    for (std::int64_t t = 0; t < state_.tensors; ++t) {
      StateTensor tensor;
      tensor.shape = state_.shape;
      if (state_.sharding == PlannedState::Sharding::replicated) {
        tensor.chunks.push_back({Box::full(state_.shape), nullptr});
      } else if (static_cast<std::size_t>(rank) < boxes_.size()) {
        tensor.chunks.push_back({Box(boxes_[static_cast<std::size_t>(rank)]), nullptr});
      }
      const std::string name = name_of(t);
      state.push_back({name, {"model", name.substr(6)}, std::move(tensor)});
    }
    const Stopwatch watch;
    SavePlanner planner;
    SavePlan plan = planner.create_local_plan(state);
    for (std::size_t i = 0; i < plan.size(); ++i) {
      plan.set_stored_bytes(i, forms_.of_chunk(DType::float32, plan[i].box.sizes)->total_bytes());
    }
    entries_ = plan.encode_entries();
    items_ = plan.encode_items();
    if (rank == 0) cost_.local_plan = watch.seconds();
  }

  GatheredPlans gather() {
    std::vector<GatheredPlans::Encoded> encoded;
    encoded.reserve(static_cast<std::size_t>(state_.ranks));
    for (std::int64_t rank = 0; rank < state_.ranks; ++rank) {
      check_cancelled();
      plan_of(rank);
      if (rank == 0) before_bytes_ = status_bytes("VmRSS");
      cost_.items += load_little_endian<std::uint64_t>(items_.data());
      encoded.push_back({rank == 0 ? entries_ : Bytes(), items_});
    }
    return GatheredPlans(std::move(encoded));
  }

  const PlannedState& state_;
  const Cancellation* cancellation_;
  BoxList boxes_;
  ItemForms forms_;
  Bytes entries_, items_;
  std::uint64_t before_bytes_ = 0;
  PlanningCost cost_;
};

}  // namespace

PlanningCost measure_planning(const PlannedState& state, const Cancellation* cancellation) {
  check(state);
  return Planning(state, cancellation).measure();
}

}  // namespace tessera::checkpoint
