#pragma once
/// \file
/// How a tensor gets from one layout on a mesh to another of the same mesh and size, at the least that can be sent.
///
/// First what is partial and shall not stay so is reduced, one mesh dimension after the other: to all its ranks
/// (all-reduce), or each to its part (reduce-scatter), whichever leaves less to be sent in the end. Then elements move,
/// each rank getting what it lacks from the nearest rank that has it, all in one exchange. Last, what shall be partial
/// is made so, from the last mesh dimension to the first, without communication. Pure, and the same on all ranks.
///
/// Law: the moves to a rank partition its local tensor as `moved`. PyTorch: torch/distributed/tensor/_redistribute.py,
/// which goes from mesh dimension to mesh dimension, with a collective for each.

#include <cstdint>
#include <vector>

#include "tessera/layout/box.h"
#include "tessera/layout/mesh_layout.h"

namespace tessera {

/// The partial elements of the ranks along a mesh dimension become what they stand for.
struct MeshReduction {
  std::size_t mesh_dim = 0;
  Placement to;  ///< replicate, or the shard that each rank gets
  bool operator==(const MeshReduction&) const = default;
};

/// A box of the tensor goes from one rank to another, or stays; both by their place in the mesh, row-major.
struct MeshMove {
  std::int64_t source = 0, destination = 0;
  std::size_t source_box = 0, destination_box = 0;  ///< in which of their local boxes it is
  Box box;
  bool operator==(const MeshMove&) const = default;
};

struct MeshRedistribution {
  std::vector<MeshReduction> reductions;    ///< in this order
  Placements reduced;                       ///< where the tensor is after them
  std::vector<MeshMove> moves;              ///< from there to `moved`, by destination; those that stay included
  std::vector<std::size_t> exchanged_dims;  ///< the mesh dimensions in whose coordinate a source and its destination
                                            ///< differ, ascending; none: every rank has all that it shall have
  Placements moved;                         ///< where the tensor is then
  std::vector<std::size_t> partial_dims;    ///< the mesh dimensions that become partial after that, descending
};

/// Throws `Error(invalid_argument)` for layouts of different sizes or meshes. O(n log n) for n ranks, and the moves.
MeshRedistribution plan_redistribution(const MeshLayout& from, const MeshLayout& to);
/// Of a tensor whose ranks have boxes of their own where `from` is cut: those of each rank, row-major. Nothing may be
/// partial. Throws `Error(invalid_argument)` also where the boxes of ranks that are alike wherever `from` doesn't cut
/// don't partition the tensor.
MeshRedistribution plan_redistribution(const MeshLayout& from, const std::vector<std::vector<LocalBox>>& sources,
                                       const MeshLayout& to);

}  // namespace tessera
