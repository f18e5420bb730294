#pragma once
// Local tensors of all ranks of a group become what they make together. Collectives; the local tensors are of one size
// and dtype, and stay as they are. Two ways to do it, as in exchange.h:
//
//   by collective    an all-reduce or a reduce-scatter. Any backend, device and dtype.
//   by peer memory   each rank reduces its part out of the others' memory, piece by piece within its cache, in the
//   order
//                    of the ranks. All ranks must be of one host, and the tensor on CPU.

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "tessera/base/reduce_op.h"
#include "tessera/comm/process_group.h"

namespace tessera {

// To every rank.
at::Tensor all_reduced(const ProcessGroup& group, const at::Tensor& local, ReduceOp op);
// Of the chunks into which torch.chunk cuts `dim` each rank gets its own.
at::Tensor reduce_scattered(const ProcessGroup& group, const at::Tensor& local, ReduceOp op, std::int64_t dim);

at::Tensor all_reduced_by_collective(const ProcessGroup& group, const at::Tensor& local, ReduceOp op);
at::Tensor reduce_scattered_by_collective(const ProcessGroup& group, const at::Tensor& local, ReduceOp op,
                                          std::int64_t dim);
// These want contiguous tensors of a dtype that `is_reduced_in_memory`, and peers whose memory can be read.
at::Tensor all_reduced_by_peer_memory(const ProcessGroup& group, const at::Tensor& local, ReduceOp op);
at::Tensor reduce_scattered_by_peer_memory(const ProcessGroup& group, const at::Tensor& local, ReduceOp op,
                                           std::int64_t dim);
bool is_reduced_in_memory(at::ScalarType type);

}  // namespace tessera
