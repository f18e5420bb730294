#pragma once
// Redistributes local tensors from one layout on a mesh to another. Collectives of the mesh's ranks, which must pass
// the same layouts. Results are new memory unless nothing changes. Not differentiable.

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <functional>
#include <vector>

#include "tessera/layout/mesh_layout.h"
#include "tessera/tensor/device_mesh.h"
#include "tessera/tensor/local_shards_wrapper.h"

namespace tessera {

at::Tensor redistribute_local(const DeviceMesh& mesh, const MeshLayout& from, const MeshLayout& to,
                              const at::Tensor& local);
// Starts a redistribution to another layout. All of it but its last collective has ended when this returns. The
// function that is returned waits for that one and returns what redistribute_local returns.
std::function<at::Tensor()> start_redistribute_local(const DeviceMesh& mesh, const MeshLayout& from,
                                                     const MeshLayout& to, const at::Tensor& local);
// Redistributes any boxes on each rank. `from` specifies along which mesh dimensions the ranks' boxes differ, and has
// no partial placement. `dtype` is that of the result if no rank has a shard.
at::Tensor redistribute_shards(const DeviceMesh& mesh, const MeshLayout& from, const MeshLayout& to,
                               const LocalShardsWrapper& local, at::ScalarType dtype);
// Distributes the full tensor of one rank, by its index in the mesh. The tensors of the others must have the same
// sizes.
at::Tensor distribute_from(std::int64_t rank_of_data, const DeviceMesh& mesh, const MeshLayout& to,
                           const at::Tensor& tensor);

}  // namespace tessera
