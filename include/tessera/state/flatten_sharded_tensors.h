#pragma once
/// \file
/// Converts nested sharded tensors to plain ones, which can be saved and loaded.
/// PyTorch: torch/distributed/checkpoint/_sharded_tensor_utils.py.

#include "tessera/comm/process_group.h"
#include "tessera/state/value.h"

namespace tessera {

/// Returns a copy of `state_dict`, traversed by the rules since 2.4, in which each nested sharded tensor with one shard
/// on this rank is replaced by the ShardedTensor of that shard's inner shard, at the sum of both offsets. A sharded
/// tensor without a shard on this rank, nested or not, is left out. A nested one with several shards on this rank and a
/// tensor that is not nested stay as they are. Shares elements with `state_dict`. Does not communicate.
///
/// Law: the boxes of the new metadata are the outer shards except the flattened one, then the other inner shards of
/// that one, then this rank's own; together they partition the tensor.
///
/// Only this rank's shard of the result is correct, so use it only to save and load. The ranks of the other shards are
/// not known: the metadata places all of them on rank 0 of `world`, or on rank 1 if this is rank 0.
///
/// \param world all ranks.
///
/// Throws `Error(invalid_argument)` naming the path if an inner tensor does not have exactly one shard on this rank, if
/// the inner tensor has another number of dimensions than the outer shard, and if the boxes do not partition the
/// tensor.
StateDict flatten_sharded_tensors(const StateDict& state_dict, const ProcessGroup& world = {});

}  // namespace tessera
