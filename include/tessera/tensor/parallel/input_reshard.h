#pragma once
/// \file
/// Calls whose replicated input is sharded until backward.
///
///     at::Tensor y = input_reshard([&](const at::Tensor& h) { return mlp(h); }, x, mesh["tp"], 1);
///
/// The input of tensor parallel layers is equal on all ranks. Until backward, each rank keeps its shard of it; then the
/// ranks gather it and compute the call again, as in activation checkpointing.
///
/// Law: results and gradients are those of a plain call, provided that the function is deterministic. Parameters may be
/// captured by the function; other tensors that were computed and require gradients may not. Gradients can be computed
/// by backward() only, without `inputs` and `create_graph`. Forward sends nothing beyond what the function sends. Ranks
/// run backward in the same order; a pass begins with one gather. PyTorch: input_reshard in
/// torch/distributed/tensor/parallel/input_reshard.py, which shards every tensor that autograd saves; LibTorch has no
/// hooks for these.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>

#include "tessera/tensor/device_mesh.h"
#include "tessera/tensor/dtensor.h"

namespace tessera {

/// Returns f(x), for an x that is equal on all ranks of the mesh, and keeps the shard of x along `dim`. If gradients
/// are disabled, or on a rank outside of the mesh, this is a plain call. Throws `Error(invalid_argument)` for a
/// dimension that x does not have, and what `f` throws.
at::Tensor input_reshard(std::function<at::Tensor(const at::Tensor&)> f, const at::Tensor& x, const DeviceMesh& mesh,
                         std::int64_t dim);
/// As above, for a DTensor that `f` gets as it is placed. One that is not replicated is kept as it is: a shard, strided
/// or not, is no larger.
DTensor input_reshard(std::function<DTensor(const DTensor&)> f, const DTensor& x, std::int64_t dim);

}  // namespace tessera
