#pragma once
// The moves of elements that resharding needs, computed on every rank alike without communication.
//
// Law: each element is in one move to each of its destination shards, from a source shard that has it. Moves between
// shards of one rank are not sent.

#include <c10/core/Device.h>

#include <cstdint>
#include <vector>

#include "tessera/comm/process_group.h"
#include "tessera/layout/box.h"
#include "tessera/layout/shard_metadata.h"

namespace tessera {

// A shard of a rank: its index among the rank's local shards, and its box in the full tensor.
struct ShardPlace {
  int rank = 0;
  std::size_t local = 0;
  Box box;
};

struct Move {
  std::size_t source = 0, destination = 0;  // shards of the plan
  Box box;                                  // in the full tensor's coordinates, never empty
};

struct ReshardPlan {
  std::vector<ShardPlace> sources, destinations;
  std::vector<Move> moves;
  std::int64_t element_bytes = 0;
  // Where elements are packed to be sent; whether all source and destination shards are on CPU.
  at::Device staging_device = at::kCPU;
  bool is_on_cpu = false;

  int source_rank(const Move& move) const { return sources[move.source].rank; }
  int destination_rank(const Move& move) const { return destinations[move.destination].rank; }
  std::int64_t bytes(const Move& move) const { return volume(move.box) * element_bytes; }
  // Returns the total bytes of all moves between different ranks.
  std::int64_t sent_bytes() const;
  // Returns the mean length of the contiguous runs of all moves between different ranks, in the source or the
  // destination, whichever is shorter; 0 if there are no such moves.
  std::int64_t mean_run_bytes() const;
};

// Throws Error(invalid_argument) if a shard's placement has no rank of the group.
ReshardPlan plan_reshard(const ShardedTensorMetadata& from, const ShardedTensorMetadata& to, std::int64_t element_bytes,
                         const ProcessGroup& group);

}  // namespace tessera
