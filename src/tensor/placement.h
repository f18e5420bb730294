#pragma once
// Which rank of a group has a shard.

#include "tessera/comm/process_group.h"
#include "tessera/layout/shard_metadata.h"

namespace tessera {

// A worker's name counts as its RPC rank, which is its rank in the world. Throws Error(invalid_argument) for a shard
// without a placement or a rank, for a rank that the group hasn't, and for a worker without RPC or that isn't there.
int rank_of(const ShardMetadata& shard, const ProcessGroup& group);

// The metadata of the shards of each rank of the group, as indices, in the metadata's order.
std::vector<std::vector<std::size_t>> shards_by_rank(const std::vector<ShardMetadata>& shards,
                                                     const ProcessGroup& group);

}  // namespace tessera
