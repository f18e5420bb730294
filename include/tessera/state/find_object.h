#pragma once
/// \file
/// Lookup of a tensor's shard or another value in a state dict by its index in a checkpoint's metadata.

#include "tessera/checkpoint/save_plan.h"
#include "tessera/state/value.h"

namespace tessera {

/// Returns the value of `state` that `index` identifies. Of a tensor of any kind, returns this rank's shard with that
/// offset in the full tensor, which shares memory with it. A tensor that is not sharded has the offset 0 in each
/// dimension. Without an offset, returns a tensor that is not sharded, or the only local chunk of a DTensor or another
/// Checkpointable. `index.index` is a hint: the likely position of the shard.
///
/// Throws `Error(not_found)` if `state` has no such key or this rank has no such shard, and `Error(invalid_argument)`
/// for an offset of a value that is not a tensor, and for a sharded tensor without an offset.
/// PyTorch: find_state_dict_object in torch/distributed/checkpoint/utils.py.
Value find_state_dict_object(const StateDict& state, const checkpoint::MetadataIndex& index);

}  // namespace tessera
