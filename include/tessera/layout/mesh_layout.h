#pragma once
/// \file
/// Where the elements of a tensor are that is placed on a mesh of ranks.
///
/// A mesh of shape [m0, m1, ...] has a rank at each coordinate. Placements are applied from the first mesh dimension to
/// the last: each shard cuts what the ones before it have left of its dimension. So what a rank has of a dimension is a
/// list of intervals, one behind the other in its local tensor (one interval unless a strided shard cuts), and what it
/// has of the tensor is the product of these: boxes.
///
/// Laws: for fixed coordinates in the mesh dimensions that don't shard, the boxes of the others partition the tensor.
/// A local tensor's boxes partition it. With `n` mesh dimensions a question costs O(n) where no shard is strided.
/// Immutable; any number of threads may read one. PyTorch: torch/distributed/tensor/_utils.py.

#include <cstdint>
#include <span>
#include <vector>

#include "tessera/layout/box.h"
#include "tessera/layout/interval.h"
#include "tessera/layout/placement.h"

namespace tessera {

/// What a local tensor is in the whole one.
struct LocalShape {
  std::vector<std::int64_t> sizes;
  /// Of its first element. In a dimension of which it has nothing: the size of the whole, as PyTorch from 2.7 on has it
  /// (2.6 counts from the begin of what was cut last).
  std::vector<std::int64_t> offsets;
  bool operator==(const LocalShape&) const = default;
};

/// A box of the tensor that lies in a local tensor, and where it begins there.
struct LocalBox {
  Box box;
  std::vector<std::int64_t> local_offsets;
  bool operator==(const LocalBox&) const = default;
};

class MeshLayout {
 public:
  /// A tensor of `size` on a mesh of `mesh_shape` with a placement for each of its dimensions, which are normalized.
  /// Throws `Error(invalid_argument)` for another number of placements, a mesh without ranks, a negative size, and a
  /// shard of a dimension that the tensor hasn't.
  MeshLayout(std::vector<std::int64_t> size, std::vector<std::int64_t> mesh_shape, Placements placements);

  const std::vector<std::int64_t>& size() const { return size_; }
  const std::vector<std::int64_t>& mesh_shape() const { return mesh_shape_; }
  const Placements& placements() const { return placements_; }

  /// `coordinate` has a member for each mesh dimension, within it.
  LocalShape local_shape(std::span<const std::int64_t> coordinate) const;
  /// The boxes of which the local tensor consists, none if it is empty, in row-major order of where they begin.
  std::vector<LocalBox> local_boxes(std::span<const std::int64_t> coordinate) const;
  /// What the rank has of dimension `dim`, in the order of its local tensor: no interval is empty, and none begins
  /// where the one before it ends.
  std::vector<Interval> local_intervals(std::size_t dim, std::span<const std::int64_t> coordinate) const;

  bool operator==(const MeshLayout&) const = default;

 private:
  std::vector<std::int64_t> size_, mesh_shape_;
  Placements placements_;
};

/// `MeshLayout(size, mesh_shape, placements).local_shape(coordinate)`, under PyTorch's name.
LocalShape compute_local_shape_and_global_offset(std::vector<std::int64_t> size, std::vector<std::int64_t> mesh_shape,
                                                 std::span<const std::int64_t> coordinate, Placements placements);

/// How many ranks a mesh of this shape has. Throws `Error(invalid_argument)` unless each dimension is at least 1 long.
std::int64_t mesh_size(std::span<const std::int64_t> mesh_shape);
/// The coordinate of the i-th rank of a mesh, in row-major order, and back.
std::vector<std::int64_t> mesh_coordinate(std::span<const std::int64_t> mesh_shape, std::int64_t i);
std::int64_t mesh_index(std::span<const std::int64_t> mesh_shape, std::span<const std::int64_t> coordinate);

}  // namespace tessera
