#pragma once
/// \file
/// Differentiable collectives.
///
/// Each returns a new tensor; the gradient of its input is computed by the inverse collective. All ranks of the group
/// call them in the same order, and all run backward through them in the same order. If the input of one rank needs a
/// gradient and that of another does not, the first rank waits in backward until the timeout. Inputs have at least one
/// dimension and, unless stated otherwise, the same sizes on all ranks; they need not be contiguous. Errors are those
/// of ProcessGroup's collectives. PyTorch: torch/distributed/nn/functional.py.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <vector>

#include "tessera/comm/process_group.h"

namespace tessera::functional {

/// Concatenates each rank's [n, ...] along dimension 0, by rank: [size * n, ...].
at::Tensor all_gather(const ProcessGroup& group, const at::Tensor& input);
/// Sums [size * n, ...] over the ranks; rank r gets rows [r * n, (r + 1) * n).
at::Tensor reduce_scatter(const ProcessGroup& group, const at::Tensor& input);
/// Sums over the ranks.
at::Tensor all_reduce(const ProcessGroup& group, const at::Tensor& input);
/// Sums each tensor over the ranks, in one collective for all of them. They may have any sizes, and have one dtype and
/// device. PyTorch: all_reduce_coalesced of torch/distributed/_functional_collectives.py.
std::vector<at::Tensor> all_reduce_coalesced(const ProcessGroup& group, std::span<const at::Tensor> inputs);
/// Sends the next in_splits[r] rows (of dimension 0) of `input` to rank r; the next out_splits[r] rows of the result
/// come from rank r. The numbers of rows may differ between ranks, the other sizes must not.
at::Tensor all_to_all(const ProcessGroup& group, const at::Tensor& input, std::span<const std::int64_t> out_splits,
                      std::span<const std::int64_t> in_splits);
/// Returns `input`, which must be equal on all ranks, and sums its gradient over the ranks. For replicated parameters
/// that each rank uses for its own part of the work.
at::Tensor sum_gradients(const ProcessGroup& group, const at::Tensor& input);

}  // namespace tessera::functional
