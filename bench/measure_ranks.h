#pragma once
// What benchmarks of several ranks have in common.

#include <chrono>
#include <functional>
#include <memory>
#include <vector>

#include "measure.h"
#include "tessera/comm/process_group.h"
#include "tessera/layout/sharding_spec.h"

namespace tessera::bench {

// From when all ranks begin to when all have ended.
inline double seconds(const ProcessGroup& group, const std::function<void()>& f) {
  group.barrier();
  const auto begin = std::chrono::steady_clock::now();
  f();
  group.barrier();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// Cut in one dimension, a part on each rank.
inline std::shared_ptr<const ShardingSpec> chunks(std::int64_t dim, int ranks) {
  std::vector<RemoteDevice> placements;
  for (int rank = 0; rank < ranks; ++rank) placements.emplace_back(rank, Device{});
  return std::make_shared<ChunkShardingSpec>(dim, placements);
}

}  // namespace tessera::bench
