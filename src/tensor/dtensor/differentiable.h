#pragma once
// Redistribution of local tensors that autograd tracks.

#include <ATen/core/Tensor.h>

#include "tessera/layout/mesh_layout.h"
#include "tessera/tensor/device_mesh.h"

namespace tessera {

// Returns the layout of the gradient of a tensor: partial placements are replicated.
MeshLayout gradient_of(const MeshLayout& layout);
// As redistribute_local, differentiable, also several times.
at::Tensor redistributed(const DeviceMesh& mesh, const MeshLayout& from, const MeshLayout& to, const at::Tensor& local);

}  // namespace tessera
