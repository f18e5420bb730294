#pragma once
/// \file
/// Gathers the sharded tensors of a state dict into full tensors. PyTorch: `_gather_state_dict` in
/// torch/distributed/_state_dict_utils.py.

#include "tessera/comm/process_group.h"
#include "tessera/state/value.h"

namespace tessera {

/// Returns a copy of `state`, nested as it is, in which each sharded tensor, DTensor and other Checkpointable is the
/// full tensor, on the device of this rank's first box or else on the CPU. Plain tensors, and sharded ones of which
/// every rank has all elements in one box, are not copied and share memory with `state`. If `cpu_offload` is set, all
/// tensors are moved to the CPU, only rank 0 gets the result, and the other ranks get an empty dict.
///
/// The boxes of all ranks must partition each tensor; boxes that several ranks have count once. The elements are sent
/// one tensor at a time, by the first rank that has them, through memory of the CPU.
///
/// A collective of `group`. Throws on every rank: `Error(invalid_argument)` if the ranks have different sharded
/// tensors, or boxes that do not partition one, as when ranks are missing in the group; `Error(unsupported)` for nested
/// sharded tensors, for shards that are not strided, and for shards on meta, with `cpu_offload` for any tensor there.
StateDict gather_state_dict(const StateDict& state, const ProcessGroup& group, bool cpu_offload = false);

}  // namespace tessera
