#pragma once
// Helpers of benchmarks with several ranks.

#include <chrono>
#include <memory>
#include <vector>

#include "measure.h"
#include "tessera/base/function_ref.h"
#include "tessera/comm/process_group.h"
#include "tessera/layout/sharding_spec.h"

namespace tessera::bench {

// Seconds from when all ranks have begun `f` to when all have finished it.
inline double seconds(const ProcessGroup& group, FunctionRef<void()> f) {
  group.barrier();
  const auto begin = std::chrono::steady_clock::now();
  f();
  group.barrier();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// Shards `dim` into one chunk per rank.
inline std::shared_ptr<const ShardingSpec> chunks(std::int64_t dim, int ranks) {
  std::vector<RemoteDevice> placements;
  for (int rank = 0; rank < ranks; ++rank) placements.emplace_back(rank, Device{});
  return std::make_shared<ChunkShardingSpec>(dim, placements);
}

}  // namespace tessera::bench
