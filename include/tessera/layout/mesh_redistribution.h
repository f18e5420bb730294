#pragma once
/// \file
/// Plans that redistribute a tensor from one layout to another on the same mesh, at the least cost.
///
/// A plan has three stages. First, partial mesh dimensions that must not stay partial are reduced, one after the other,
/// to all ranks (all-reduce) or to each rank's part (reduce-scatter). The plan selects what costs less in total: few
/// collectives if the tensor is small, few elements if it is large (see redistribution_cost.h). Then elements move in
/// one exchange: each rank gets the elements that it lacks from the nearest rank that has them. Last, dimensions that
/// become partial are made so, from the last mesh dimension to the first, without communication.
///
/// Pure functions. A plan lists the moves of one rank; all else in it is the same on all ranks, and takes O(n) for n
/// ranks. Law: the moves to a rank partition its local tensor under `moved`. Law: the moves from one rank to another
/// are in the same order in the plans of both. PyTorch: torch/distributed/tensor/_redistribute.py, which runs one
/// collective per mesh dimension.

#include <cstdint>
#include <vector>

#include "tessera/layout/box.h"
#include "tessera/layout/mesh_layout.h"

namespace tessera {

/// A reduction of the ranks' partial elements along a mesh dimension.
struct MeshReduction {
  std::size_t mesh_dim = 0;
  Placement to;  ///< replicate, or the shard that each rank gets
  bool operator==(const MeshReduction&) const = default;
};

/// A box of the tensor that moves from one rank to another, or stays. Ranks are row-major positions in the mesh.
struct MeshMove {
  std::int64_t source = 0, destination = 0;
  std::size_t source_box = 0, destination_box = 0;  ///< indices of the local boxes that contain it
  Box box;
  Box source_extent;  ///< the local box of the source that contains it
  bool operator==(const MeshMove&) const = default;
};

/// The plan of a redistribution: reductions, then moves, then dimensions that become partial.
struct MeshRedistribution {
  std::vector<MeshReduction> reductions;    ///< in this order
  Placements reduced;                       ///< the placements after the reductions
  std::vector<MeshMove> moves;              ///< from `reduced` to `moved`: what the rank gets, by source, also from
                                            ///< itself; then what it sends to others, by destination
  std::vector<std::size_t> exchanged_dims;  ///< the mesh dimensions in which the coordinates of a source and its
                                            ///< destination differ, ascending; none: no element is sent
  Placements moved;                         ///< the placements after the moves
  std::vector<std::size_t> partial_dims;    ///< the mesh dimensions that become partial after the moves, descending
  std::int64_t sent = 0;                    ///< elements that all ranks send, in total, with those of the reductions
  /// Of the moves alone, in elements: those that all ranks send, a number that no message between two ranks exceeds,
  /// and the mean length of a contiguous run of a move in the source's or the destination's local tensor, whichever has
  /// shorter runs (exact if the ranks divide the sizes).
  std::int64_t moved_elements = 0, largest_message = 0, run_length = 0;
  bool operator==(const MeshRedistribution&) const = default;
};

/// Plans the redistribution of a tensor for the rank at position `rank` of the mesh, row-major. Throws
/// `Error(invalid_argument)` for layouts of different sizes or meshes, and for a position that the mesh does not have.
MeshRedistribution plan_redistribution(const MeshLayout& from, const MeshLayout& to, std::int64_t rank);
/// Plans the redistribution of a tensor whose ranks hold `sources` (by rank, row-major) instead of the boxes that
/// `from` gives them. The plan has the moves of all ranks, by destination. Throws `Error(invalid_argument)` for layouts
/// of different sizes or meshes, for a partial placement that changes, and if, among ranks with equal coordinates in
/// all mesh dimensions that `from` does not shard, the boxes do not partition the tensor. Takes O(n log n) for n ranks,
/// plus the moves.
MeshRedistribution plan_redistribution(const MeshLayout& from, const std::vector<std::vector<LocalBox>>& sources,
                                       const MeshLayout& to);
/// Returns the elements that all ranks send, in total, to redistribute a tensor: 0 if none is sent. An all-reduce of n
/// elements over r ranks counts as 2 n (r - 1), a reduce-scatter as n (r - 1). PyTorch: redistribute_cost, which
/// estimates a time.
std::int64_t redistribution_cost(const MeshLayout& from, const MeshLayout& to);

}  // namespace tessera
