#pragma once
/// \file
/// The cost of planning a save on any number of ranks, measured on one machine: the plans of all ranks are made in one
/// process, without tensors, and merged by the real planner.

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/base/cancellation.h"

namespace tessera::checkpoint {

struct PlannedState {
  std::int64_t ranks = 1024;
  std::int64_t tensors = 1024;
  std::vector<std::int64_t> shape = {8192, 8192};  ///< of each tensor
  /// The layout of each tensor: sharded in dimension `dim` over all ranks, or replicated on every rank.
  enum class Sharding : std::uint8_t { sharded, replicated } sharding = Sharding::sharded;
  std::int64_t dim = 0;
  std::size_t files_per_rank = 1;
};

struct PlanningCost {
  // Seconds.
  double local_plan = 0;      ///< on one rank: making and encoding its plan
  double global_plan = 0;     ///< on the coordinator: merging the plans of all ranks
  double placement = 0;       ///< on the coordinator: assigning a file and an offset to each item
  double metadata_write = 0;  ///< on the coordinator: serializing `.metadata`
  double coordinator() const { return global_plan + placement + metadata_write; }
  // Bytes.
  std::uint64_t gathered_bytes = 0;   ///< from all ranks together
  std::uint64_t scattered_bytes = 0;  ///< to all ranks together
  std::uint64_t metadata_bytes = 0;
  /// Peak memory of the coordinator's phases, including the gathered plans and the serialized metadata.
  std::uint64_t peak_memory_bytes = 0;
  std::uint64_t items = 0;   ///< in all plans together
  std::uint64_t stored = 0;  ///< items that are written, counting replicas once
};

/// Plans a save of `state` and returns the cost. Throws `Error(invalid_argument)` if a count or a size is out of range,
/// and `Error(cancelled)`.
PlanningCost measure_planning(const PlannedState& state, const Cancellation* cancellation = nullptr);

}  // namespace tessera::checkpoint
