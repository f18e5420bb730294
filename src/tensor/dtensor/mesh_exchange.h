#pragma once
// Local tensors from one layout on a mesh to another. Collectives of the ranks of the mesh, which all bring the same
// layouts; the results are new memory unless nothing changes. No gradients.

#include <ATen/core/Tensor.h>

#include <vector>

#include "tessera/layout/mesh_layout.h"
#include "tessera/tensor/device_mesh.h"
#include "tessera/tensor/local_shards_wrapper.h"

namespace tessera {

at::Tensor redistribute_local(const DeviceMesh& mesh, const MeshLayout& from, const MeshLayout& to,
                              const at::Tensor& local);
// From the boxes that each rank has, which say themselves where they are; `from` says along which mesh dimensions they
// differ.
at::Tensor redistribute_shards(const DeviceMesh& mesh, const MeshLayout& from, const MeshLayout& to,
                               const LocalShardsWrapper& local);
// From the whole tensor that the first rank of the mesh has; of the others it must have the sizes.
at::Tensor distribute_from_first(const DeviceMesh& mesh, const MeshLayout& to, const at::Tensor& tensor);

}  // namespace tessera
