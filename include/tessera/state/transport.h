#pragma once
/// \file
/// Sends a state dict from the memory of one rank to that of others, without a file.
///
///     if (group.rank() == 0) send_state_dict(state, {1, 2}, group);
///     if (group.rank() == 1 || group.rank() == 2) state = receive_state_dict(0, group);
///
/// The values arrive as they were. Objects are not executed (see object_archive.h). A plain tensor keeps its strides,
/// and tensors that overlap in one storage share one again: each byte is sent once. What the sender has of a
/// ShardedTensor, a DTensor or another Checkpointable arrives as a Checkpointable with the same boxes of the same full
/// tensor, which can be saved, gathered or received into a tensor of the original kind. A Stateful arrives as its
/// state.
///
/// The sender and a receiver call the matching functions, as in point_to_point.h; other ranks take no part. A
/// description is sent first. Then elements are received directly into the memory of their tensors, if those are
/// contiguous and on the CPU. Elements on other devices are copied to the CPU and sent from there; new tensors are on
/// the CPU.
///
/// Errors: those of point_to_point.h. If the sender cannot send the state, or a receiver cannot receive it, both throw
/// an `Error` naming the rank and the reason before elements are sent, and the group stays usable. Throws
/// `Error(unsupported)` for a value that save_object does not accept, for a tensor that is not strided and for a nested
/// sharded tensor. PyTorch: PGTransport in torch/distributed/checkpoint/_pg_transport.py.

#include <initializer_list>
#include <span>

#include "tessera/comm/process_group.h"
#include "tessera/state/value.h"

namespace tessera {

/// Sends `state` to each of the ranks `to`, one after another. If a receiver refuses it, the others still receive it,
/// and then this throws. Functions of a Stateful must not communicate.
void send_state_dict(const StateDict& state, std::span<const int> to, const ProcessGroup& group);
void send_state_dict(const StateDict& state, std::initializer_list<int> to, const ProcessGroup& group);

/// Returns the state dict that `from` sends, in new memory.
StateDict receive_state_dict(int from, const ProcessGroup& group);

/// Receives the state dict that `from` sends into the tensors of `state`. It must have tensors at the same paths as the
/// sender's, with the same dtypes, shapes and boxes; otherwise sender and receiver throw `Error(invalid_argument)`
/// naming a path, and `state` does not change. All other values are replaced by the sender's. A Stateful loads its
/// state. If an error occurs after that comparison, some tensors may have been overwritten.
void receive_state_dict_into(StateDict& state, int from, const ProcessGroup& group);

}  // namespace tessera
