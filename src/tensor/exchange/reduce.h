#pragma once
// Reductions of the local tensors of all ranks of a group. Collectives; the local tensors have one size and dtype and
// are not modified. Ranks that share memory reduce what they have into the result, in the order of the ranks; others
// reduce a copy.

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

// Start the same. The function that is returned waits, and returns the result.
std::function<at::Tensor()> start_all_reduce(const ProcessGroup& group, const at::Tensor& local, ReduceOp op);
std::function<at::Tensor()> start_reduce_scatter(const ProcessGroup& group, const at::Tensor& local, ReduceOp op,
                                                 std::int64_t dim);

}  // namespace tessera
