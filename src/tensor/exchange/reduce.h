#pragma once
// Reductions of the local tensors of all ranks of a group. Collectives; the local tensors have one size and dtype and
// are not modified. As in exchange.h, there are two ways:
//
//   by collective    An all-reduce or a reduce-scatter. Any backend, device and dtype.
//   by peer memory   Each rank reduces its part out of the others' memory, in pieces that fit into its cache, in the
//                    order of the ranks. All ranks must be on one host and the tensor on CPU.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>

#include "tessera/base/reduce_op.h"
#include "tessera/comm/process_group.h"

namespace tessera {

// Returns the reduced tensor on every rank.
at::Tensor all_reduced(const ProcessGroup& group, const at::Tensor& local, ReduceOp op);
// Returns this rank's chunk of the reduced tensor, split along `dim` as torch.chunk splits.
at::Tensor reduce_scattered(const ProcessGroup& group, const at::Tensor& local, ReduceOp op, std::int64_t dim);

// Start the same by collective. The function that is returned waits, and returns the result.
std::function<at::Tensor()> start_all_reduce(const ProcessGroup& group, const at::Tensor& local, ReduceOp op);
std::function<at::Tensor()> start_reduce_scatter(const ProcessGroup& group, const at::Tensor& local, ReduceOp op,
                                                 std::int64_t dim);

at::Tensor all_reduced_by_collective(const ProcessGroup& group, const at::Tensor& local, ReduceOp op);
at::Tensor reduce_scattered_by_collective(const ProcessGroup& group, const at::Tensor& local, ReduceOp op,
                                          std::int64_t dim);
// These require contiguous tensors of a dtype that `is_reduced_in_memory`, and peers whose memory is readable.
at::Tensor all_reduced_by_peer_memory(const ProcessGroup& group, const at::Tensor& local, ReduceOp op);
at::Tensor reduce_scattered_by_peer_memory(const ProcessGroup& group, const at::Tensor& local, ReduceOp op,
                                           std::int64_t dim);
bool is_reduced_in_memory(at::ScalarType type);

}  // namespace tessera
