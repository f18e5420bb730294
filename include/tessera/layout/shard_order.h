#pragma once
/// \file
/// The order in which mesh dimensions shard a tensor dimension.
///
/// Placements apply from the first mesh dimension to the last. If several mesh dimensions shard one tensor dimension,
/// strided shards express every other order: under the order [1, 0] on a mesh of shape [2, 4], mesh dimension 1 splits
/// first, and the placements are [_S(0, 4), S(0)].
///
/// Laws: `shard_order(with_shard_order(placements, order, mesh_shape), mesh_shape)` is `order`. If the length of the
/// tensor dimension is divisible by the ranks that shard it, each rank has the part that splitting in that order gives
/// it. Other lengths are partitioned too, but a rank may have several intervals. Pure functions. PyTorch: `shard_order`
/// in torch/distributed/tensor/_dtensor_spec.py.

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tessera/layout/placement.h"

namespace tessera {

/// The mesh dimensions that shard a tensor dimension, in the order in which they split it.
struct ShardOrderEntry {
  std::int64_t tensor_dim = 0;
  std::vector<std::int64_t> mesh_dims;
  bool operator==(const ShardOrderEntry&) const = default;
};

/// An entry for each tensor dimension that is sharded, ascending.
using ShardOrder = std::vector<ShardOrderEntry>;

/// Returns the order from the first mesh dimension to the last. Dimensions of shards count from the front.
ShardOrder default_shard_order(std::span<const Placement> placements);
/// Returns the placements under which the mesh dimensions split in `order`. `placements` has no strided shard. Throws
/// `Error(invalid_argument)` unless there is a placement for each mesh dimension and `order` has, in ascending order,
/// the tensor dimensions that are sharded, each with the mesh dimensions that shard it.
Placements with_shard_order(std::span<const Placement> placements, const ShardOrder& order,
                            std::span<const std::int64_t> mesh_shape);
/// Returns the order that these placements express; nullopt if their strided shards express none, as [_S(0, 3), S(0)]
/// on a mesh of shape [2, 2]. Where mesh dimensions of one rank permit several orders, returns one of them.
std::optional<ShardOrder> shard_order(std::span<const Placement> placements, std::span<const std::int64_t> mesh_shape);
/// Returns placements without strided shards and the place of each mesh dimension in the order, as PyTorch prints them:
/// "P(sum)S(1)[1]S(1)[0]R".
std::string to_string(std::span<const Placement> placements, const ShardOrder& order);

}  // namespace tessera
