#pragma once
/// \file
/// Makes nested sharded tensors into plain ones, so that they can be saved and loaded.
/// PyTorch: torch/distributed/checkpoint/_sharded_tensor_utils.py.

#include "tessera/comm/process_group.h"
#include "tessera/state/value.h"

namespace tessera {

/// A copy of `state_dict`, walked through by the rules since 2.4, in which every nested sharded tensor with one shard
/// on this rank is the ShardedTensor of that shard's inner shard, at the sum of both offsets. A sharded tensor without
/// a shard on this rank, nested or not, is left out; one with several, and one that isn't nested, is as it was.
/// Elements are shared with `state_dict`.
///
/// Law: the boxes of the metadata are those of the outer shards without the one that is taken apart, then the other
/// inner shards of that one, then this rank's own; together they partition the tensor.
///
/// What is made is right in this rank's shard alone and good for nothing but saving and loading: where the other shards
/// are is not known, so they are all said to be on rank 0 of `world` (on rank 1, if this is rank 0).
///
/// \param world all ranks; nothing is communicated.
///
/// Throws `Error(invalid_argument)` naming the path: for an inner tensor that has no shard on this rank or several, for
/// one of another rank than the outer shard, and where the boxes don't partition the tensor.
StateDict flatten_sharded_tensors(const StateDict& state_dict, const ProcessGroup& world = {});

}  // namespace tessera
