#pragma once
// Which rank of a group has which shards, and whether they make up a tensor.

#include <c10/core/Device.h>

#include <string_view>
#include <vector>

#include "tessera/comm/process_group.h"
#include "tessera/layout/box.h"
#include "tessera/layout/shard_metadata.h"

namespace tessera {

// A worker's name counts as its RPC rank, which is its rank in the world. Throws Error(invalid_argument) for a shard
// without a placement or a rank, for a rank that the group hasn't, and for a worker without RPC or that isn't there.
int rank_of(const ShardMetadata& shard, const ProcessGroup& group);

// The metadata of the shards of each rank of the group, as indices, in the metadata's order.
std::vector<std::vector<std::size_t>> shards_by_rank(const std::vector<ShardMetadata>& shards,
                                                     const ProcessGroup& group);

// `dims`: the number of dimensions, should there be no shards.
BoxList boxes_of(const std::vector<ShardMetadata>& shards, std::size_t dims);

// Where elements of these shards are packed to be sent, alike on all ranks, also those that have none: the kind of
// device of the first.
at::Device staging_device(const std::vector<ShardMetadata>& shards);

// Throws Error(invalid_argument) unless the shards partition the tensor; a user's own spec might give others. Empty
// shards may be anywhere. `what` is done, for messages.
void check_partition(const ShardedTensorMetadata& metadata, std::string_view what);

}  // namespace tessera
