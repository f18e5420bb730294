#pragma once
// The rank of each shard, and checks that shards partition a tensor.

#include <c10/core/Device.h>

#include <string_view>
#include <vector>

#include "tessera/comm/process_group.h"
#include "tessera/layout/box.h"
#include "tessera/layout/shard_metadata.h"

namespace tessera {

// Returns the shard's rank in the group. A worker's name stands for its RPC rank, which is its rank in the world.
// Throws Error(invalid_argument) for a shard without a placement or a rank, a rank outside of the group, an unknown
// worker, and a worker's name if RPC is not initialized.
int rank_of(const ShardMetadata& shard, const ProcessGroup& group);

// Returns the indices of each rank's shards, in the order of `shards`.
std::vector<std::vector<std::size_t>> shards_by_rank(const std::vector<ShardMetadata>& shards,
                                                     const ProcessGroup& group);

// `dims` is the number of dimensions, needed if there are no shards.
BoxList boxes_of(const std::vector<ShardMetadata>& shards, std::size_t dims);

// Returns the device where elements of these shards are packed to be sent: that of the first shard, without index. It
// is the same on all ranks, including those without shards.
at::Device staging_device(const std::vector<ShardMetadata>& shards);

// Throws Error(invalid_argument) unless the shards partition the tensor; a custom spec may violate this. Empty
// shards may be anywhere. `what` names the operation in messages.
void check_partition(const ShardedTensorMetadata& metadata, std::string_view what);

}  // namespace tessera
