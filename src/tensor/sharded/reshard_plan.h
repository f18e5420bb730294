#pragma once
// The moves of elements that a rank takes part in when tensors are laid out in another way, computed without
// communication.
//
// Law: each element is in one move to each of its destination shards, from a source shard that has it. Moves between
// shards of one rank are not sent. The moves from one rank to another are in the same order in the plans of both.

#include <cstdint>
#include <vector>

#include "tessera/comm/process_group.h"
#include "tessera/layout/box.h"
#include "tessera/layout/internal/exchange_size.h"
#include "tessera/layout/shard_metadata.h"

namespace tessera {

struct Move {
  int source_rank = 0, destination_rank = 0;  // of the group
  std::size_t source = 0, destination = 0;    // shards, by their index among those of their rank
  Box box;                                    // in the full tensor's coordinates, never empty
};

struct ReshardPlan {
  std::vector<Box> sources, destinations;  // the shards of this rank
  std::vector<Move> moves;                 // of which this rank is the source or the destination
  ExchangeSize size;                       // of the moves of all ranks
};

// The plan for shards of sharded tensors. Throws Error(invalid_argument) if a shard's placement has no rank of the
// group.
ReshardPlan plan_reshard(const ShardedTensorMetadata& from, const ShardedTensorMetadata& to, const ProcessGroup& group);

// Returns whether all shards are on CPU.
bool are_on_cpu(const std::vector<ShardMetadata>& shards);

}  // namespace tessera
