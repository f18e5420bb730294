#pragma once
/// \file
/// Collectives that gradients flow back through.
///
/// Each returns a new tensor; the gradient of its input is made by the collective that undoes it. All ranks of the
/// group call them, and all run backward through them, in the same order: a rank whose input needs no gradient where
/// another's does leaves that one waiting until the timeout. Inputs have at least one dimension and the same sizes on
/// all ranks but where said otherwise; they need not be contiguous. Errors are those of ProcessGroup's collectives.
/// PyTorch: torch/distributed/nn/functional.py.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>

#include "tessera/comm/process_group.h"

namespace tessera::functional {

/// [n, ...] of each rank, one behind the other along dimension 0: [size * n, ...].
at::Tensor all_gather(const ProcessGroup& group, const at::Tensor& input);
/// The sum over the ranks of [size * n, ...], of which rank r gets rows [r * n, (r + 1) * n).
at::Tensor reduce_scatter(const ProcessGroup& group, const at::Tensor& input);
/// The sum over the ranks.
at::Tensor all_reduce(const ProcessGroup& group, const at::Tensor& input);
/// Of `input` the next in_splits[r] rows (of dimension 0) go to rank r; of the result the next out_splits[r] come from
/// rank r. The numbers of rows may differ between ranks, the other sizes must not.
at::Tensor all_to_all(const ProcessGroup& group, const at::Tensor& input, std::span<const std::int64_t> out_splits,
                      std::span<const std::int64_t> in_splits);
/// `input` as it is, which all ranks have alike; its gradient is the sum of what the ranks make of it. For parameters
/// that every rank has whole and uses for its own part of the work.
at::Tensor sum_gradients(const ProcessGroup& group, const at::Tensor& input);

}  // namespace tessera::functional
