#pragma once
/// \file
/// The layout of a tensor on a mesh of ranks: which elements each rank holds.
///
/// A mesh of shape [m0, m1, ...] has a rank at each coordinate. Placements apply from the first mesh dimension to the
/// last: each shard splits what the earlier ones left of its tensor dimension. A rank therefore holds a list of
/// intervals of each tensor dimension, stored one after another in its local tensor (one interval unless a shard is
/// strided), and its part of the tensor is their product: boxes.
///
/// Laws: for fixed coordinates in the mesh dimensions that do not shard, the boxes of the ranks along the other
/// dimensions partition the tensor. The boxes of a local tensor partition it. With n mesh dimensions a query takes O(n)
/// if no shard is strided. Immutable; any number of threads may read a layout. PyTorch:
/// torch/distributed/tensor/_utils.py.

#include <cstdint>
#include <span>
#include <vector>

#include "tessera/layout/box.h"
#include "tessera/layout/interval.h"
#include "tessera/layout/placement.h"

namespace tessera {

/// The shape of a local tensor and its position in the full tensor.
struct LocalShape {
  std::vector<std::int64_t> sizes;
  /// Of the first element. If the rank holds nothing of a dimension, the offset is the size of the full tensor, as in
  /// PyTorch 2.14 (2.6 counts from the beginning of the last split).
  std::vector<std::int64_t> offsets;
  bool operator==(const LocalShape&) const = default;
};

/// A box of the tensor that is stored in a local tensor, and where it begins there.
struct LocalBox {
  Box box;
  std::vector<std::int64_t> local_offsets;
  bool operator==(const LocalBox&) const = default;
};

/// A tensor's size, the shape of its mesh, and its placements.
class MeshLayout {
 public:
  /// Places a tensor of `size` on a mesh of `mesh_shape`, with one placement per mesh dimension. Normalizes the
  /// placements. Throws `Error(invalid_argument)` for another number of placements, a mesh without ranks, a negative
  /// size, a shard of a dimension that the tensor does not have, and partial placements of several kinds other than
  /// sums with averages.
  MeshLayout(std::vector<std::int64_t> size, std::vector<std::int64_t> mesh_shape, Placements placements);

  const std::vector<std::int64_t>& size() const { return size_; }
  const std::vector<std::int64_t>& mesh_shape() const { return mesh_shape_; }
  const Placements& placements() const { return placements_; }

  /// Returns shape and offset of a rank's local tensor. `coordinate` has one member per mesh dimension, within its
  /// length.
  LocalShape local_shape(std::span<const std::int64_t> coordinate) const;
  /// Returns the boxes that make up the local tensor, in row-major order of their beginnings; none if it is empty.
  std::vector<LocalBox> local_boxes(std::span<const std::int64_t> coordinate) const;
  /// Returns the rank's intervals of dimension `dim`, in the order of its local tensor. No interval is empty, and none
  /// begins where the previous one ends.
  std::vector<Interval> local_intervals(std::size_t dim, std::span<const std::int64_t> coordinate) const;

  bool operator==(const MeshLayout&) const = default;

 private:
  std::vector<std::int64_t> size_, mesh_shape_;
  Placements placements_;
};

/// Returns `MeshLayout(size, mesh_shape, placements).local_shape(coordinate)`, under PyTorch's name.
LocalShape compute_local_shape_and_global_offset(std::vector<std::int64_t> size, std::vector<std::int64_t> mesh_shape,
                                                 std::span<const std::int64_t> coordinate, Placements placements);

/// Return whether each sharded dimension has at least one element for each of its parts (`is_tensor_shardable`), or
/// parts of equal length (`is_tensor_evenly_shardable`). A strided shard on n ranks makes n * split_factor parts; the
/// shards of one dimension multiply. Throw as MeshLayout. PyTorch: the functions of these names in
/// torch/distributed/tensor/_ops/utils.py.
bool is_tensor_shardable(std::vector<std::int64_t> size, std::vector<std::int64_t> mesh_shape, Placements placements);
bool is_tensor_evenly_shardable(std::vector<std::int64_t> size, std::vector<std::int64_t> mesh_shape,
                                Placements placements);

/// Returns the number of ranks of a mesh. Throws `Error(invalid_argument)` for a dimension shorter than 1.
std::int64_t mesh_size(std::span<const std::int64_t> mesh_shape);
/// Convert between the i-th rank of a mesh, in row-major order, and its coordinate.
std::vector<std::int64_t> mesh_coordinate(std::span<const std::int64_t> mesh_shape, std::int64_t i);
std::int64_t mesh_index(std::span<const std::int64_t> mesh_shape, std::span<const std::int64_t> coordinate);

}  // namespace tessera
