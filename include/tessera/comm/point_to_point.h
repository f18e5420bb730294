#pragma once
/// \file
/// Messages from one rank of a group to another.
///
/// One rank sends and the other makes the matching call to receive; the other ranks take no part, and their collectives
/// are not disturbed. Each call blocks: it returns on the sender when its memory may be used again, and on the receiver
/// when the elements may be used (on CUDA with NCCL, when the current stream waits for them). The messages between two
/// ranks arrive in the order of the calls. A rank is in one call of a group at a time, collectives included, so that
/// two ranks that exchange data must not both send first. NCCL carries CUDA tensors; Gloo carries all others, through a
/// copy on the CPU if they are on another device. NCCL runs a message after the collectives of the group that the rank
/// has started before, also if it has not waited for them: both ranks start the same collectives before a message.
///
/// Errors: the two ranks compare their calls before data is sent. If the arguments of one are invalid, or differ, both
/// throw `Error(invalid_argument)` naming the ranks and the reason, and the group stays usable. If the other rank dies,
/// leaves, or does not arrive within the group's timeout, the waiting rank throws `Error(rank_failure)` naming it, as a
/// collective does, and the group is broken. The same happens within seconds if the other rank waits for this one in a
/// collective, and if a rank specifies a rank that is not in the group, or itself.
///
/// PyTorch: send and recv in torch/distributed/distributed_c10d.py. Unlike there, messages have no tags, and ranks
/// whose calls do not match get an error.

#include <ATen/core/Tensor.h>

#include <exception>
#include <span>
#include <string_view>

#include "tessera/base/bytes.h"
#include "tessera/comm/process_group.h"

namespace tessera {

/// Sends tensors to rank `to`. They must be contiguous, not views that conjugate or negate, and equal in number, dtypes
/// and numbers of elements to those that the other rank receives into.
void send_tensors(const ProcessGroup& group, std::span<const at::Tensor> tensors, int to);
/// Receives the tensors that rank `from` sends, into the memory of `tensors`.
void receive_tensors(const ProcessGroup& group, std::span<const at::Tensor> tensors, int from);

/// Sends bytes, of any number, to rank `to`.
void send_bytes(const ProcessGroup& group, ByteView bytes, int to);
/// Returns the bytes that rank `from` sends.
Bytes receive_bytes(const ProcessGroup& group, int from);

/// Agrees with rank `peer`, which makes the same call, on the outcome of `step`, as `ProcessGroup::agree` does with all
/// ranks.
void agree_with(const ProcessGroup& group, int peer, std::string_view step, const std::exception_ptr& failure);

}  // namespace tessera
