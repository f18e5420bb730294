#pragma once
/// \file
/// The number of shards of a tensor, and the mesh dimensions that shard it. A strided shard counts as any other: it
/// gives each rank of its mesh dimension one part. PyTorch: `dim_map`, `num_shards_map` and `num_shards` in
/// torch/distributed/tensor/_dtensor_spec.py.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "tessera/layout/mesh_layout.h"

namespace tessera {

/// Returns for each dimension of the tensor the mesh dimensions that shard it, in the order in which they do; none if
/// every rank has the entire dimension. PyTorch: `dim_map`, which permits one mesh dimension for each and gives -1 for
/// none.
std::vector<std::vector<std::size_t>> dim_map(const MeshLayout& layout);
/// Returns for each dimension of the tensor the number of its shards: the product of the lengths of these mesh
/// dimensions, 1 for none.
std::vector<std::int64_t> num_shards_map(const MeshLayout& layout);
/// Returns the number of shards of the tensor, the product of `num_shards_map`.
std::int64_t num_shards(const MeshLayout& layout);

}  // namespace tessera
