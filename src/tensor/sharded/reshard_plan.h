#pragma once
// What moves where when shards are cut anew: the same on all ranks, known without communication.
//
// Law: for every element, the move that has its index goes from the rank that has it to the rank that shall have it;
// moves whose ranks are the same stay there and are not sent.

#include <c10/core/Device.h>

#include <cstdint>
#include <vector>

#include "tessera/comm/process_group.h"
#include "tessera/layout/box.h"
#include "tessera/layout/shard_metadata.h"

namespace tessera {

// One of a rank's shards: which of its local ones it is, and what it is in the whole tensor.
struct ShardPlace {
  int rank = 0;
  std::size_t local = 0;
  Box box;
};

struct Move {
  std::size_t source = 0, destination = 0;  // shards of the plan
  Box box;                                  // in the whole tensor's coordinates, never empty
};

struct ReshardPlan {
  std::vector<ShardPlace> sources, destinations;
  std::vector<Move> moves;
  std::int64_t element_bytes = 0;
  // Where elements are packed to be sent, and whether each shard, before and after, is on CPU.
  at::Device staging_device = at::kCPU;
  bool is_on_cpu = false;

  int source_rank(const Move& move) const { return sources[move.source].rank; }
  int destination_rank(const Move& move) const { return destinations[move.destination].rank; }
  std::int64_t bytes(const Move& move) const { return volume(move.box) * element_bytes; }
  // Of all moves from one rank to another, together.
  std::int64_t sent_bytes() const;
  // The mean length of what lies in one piece in the source, or in the destination if that is shorter, of all moves
  // from one rank to another; 0 if there are none.
  std::int64_t mean_run_bytes() const;
};

// Throws Error(invalid_argument) for shards whose placement has no rank of the group.
ReshardPlan plan_reshard(const ShardedTensorMetadata& from, const ShardedTensorMetadata& to, std::int64_t element_bytes,
                         const ProcessGroup& group);

}  // namespace tessera
