#pragma once
/// \file
/// What planning a save costs at a scale that one has no machines for: the real planner on the plans of all ranks, made
/// in one process, without any tensor.

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/base/cancellation.h"

namespace tessera::checkpoint {

struct PlannedState {
  std::int64_t ranks = 1024;
  std::int64_t tensors = 1024;
  std::vector<std::int64_t> shape = {8192, 8192};  ///< of each tensor
  /// How each is laid out: cut in this dimension into as many parts as there are ranks, a part each; or whole on each.
  enum class Sharding : std::uint8_t { cut, replicated } sharding = Sharding::cut;
  std::int64_t dim = 0;
  std::size_t files_per_rank = 1;
};

struct PlanningCost {
  // Seconds.
  double local_plan = 0;      ///< of one rank: making and encoding its plan
  double global_plan = 0;     ///< on the coordinator: merging the plans of all ranks
  double placement = 0;       ///< on the coordinator: where each item is stored
  double metadata_write = 0;  ///< on the coordinator: the bytes of `.metadata`
  double coordinator() const { return global_plan + placement + metadata_write; }
  // Bytes.
  std::uint64_t gathered_bytes = 0;   ///< from all ranks together
  std::uint64_t scattered_bytes = 0;  ///< to all ranks together
  std::uint64_t metadata_bytes = 0;
  /// The most memory that the coordinator's phases took, the gathered plans and the metadata's bytes included.
  std::uint64_t peak_memory_bytes = 0;
  std::uint64_t items = 0;   ///< in all plans together
  std::uint64_t stored = 0;  ///< that are written: one of several that are alike
};

/// Throws `Error(invalid_argument)` for a state that can't be.
PlanningCost measure_planning(const PlannedState& state, const Cancellation* cancellation = nullptr);

}  // namespace tessera::checkpoint
