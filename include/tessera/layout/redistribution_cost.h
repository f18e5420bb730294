#pragma once
/// \file
/// Estimated costs of redistributions, by which ops and plans choose placements.
///
/// A redistribution takes collectives, one after another, in which the ranks send elements. An all-reduce counts as one
/// collective that sends as many elements as a reduce-scatter and an all-gather together, so it costs less than both.
/// Reductions along several mesh dimensions count separately, even where the mesh has a group that merges them.
///
/// Law: if the ranks divide the sizes, strided shards express an order of mesh dimensions (see shard_order.h) and no
/// placement is partial, `estimated_cost(from, to)` has the collectives of `plan_redistribution(from, to, rank)` and
/// its `sent` elements, divided by the ranks. Otherwise it is an estimate. Computing it takes about the same time for
/// any number of ranks. Pure functions. PyTorch: torch/distributed/tensor/_collective_utils.py.

#include <cstdint>
#include <span>

#include "tessera/layout/mesh_layout.h"

namespace tessera {

/// The time of a collective that sends nothing, as the number of elements that a rank could send meanwhile. It is about
/// right between processes of one host, and between GPUs.
inline constexpr std::int64_t kElementsPerCollective = 32768;

struct RedistributionCost {
  std::int64_t collectives = 0;  ///< one after another
  double elements = 0;           ///< that a rank sends, on average

  /// Returns the time in elements.
  double total() const { return static_cast<double>(collectives * kElementsPerCollective) + elements; }
  RedistributionCost& operator+=(const RedistributionCost& other) {
    collectives += other.collectives;
    elements += other.elements;
    return *this;
  }
};

/// Returns the cost of redistributing a tensor of `size` on a mesh of `mesh_shape`. There is a placement for each mesh
/// dimension in both lists, with dimensions from the front.
RedistributionCost estimated_cost(std::span<const std::int64_t> size, std::span<const std::int64_t> mesh_shape,
                                  const Placements& from, const Placements& to);
/// As above. Throws `Error(invalid_argument)` for layouts of different sizes or meshes.
RedistributionCost estimated_cost(const MeshLayout& from, const MeshLayout& to);

}  // namespace tessera
