#pragma once
// The moves of elements from one layout to another on the same mesh.
//
// The layouts split each dimension of the tensor by themselves, so the moves are products: of a segment of each
// dimension (see dim_change.h), and of the mesh dimensions that `from` shards and `to` does not, along which every rank
// gets the same elements. A move keeps the coordinates of the mesh dimensions that `from` does not shard: ranks that
// differ in the others hold each element once.
//
// What concerns all ranks takes O(n) for n ranks, and the moves of a rank take as long as they are many.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "layout/mesh/dim_change.h"
#include "tessera/layout/mesh_redistribution.h"

namespace tessera {

class MeshMoves {
 public:
  MeshMoves(MeshLayout from, MeshLayout to);

  // Returns the elements that all ranks send, in total.
  std::int64_t sent() const;
  // Returns the mesh dimensions in which a source and its destination have different coordinates, ascending.
  std::vector<std::size_t> exchanged_dims() const;
  // Returns a number of elements that no rank exceeds in what it sends to another.
  std::int64_t largest_message() const;
  // Returns the mean length of contiguous runs of moves, see MeshRedistribution.
  std::int64_t run_length() const;
  // Returns the moves of which a rank is the source or the destination, see MeshRedistribution.
  std::vector<MeshMove> of_rank(std::int64_t rank) const;

 private:
  class RankMoves;

  // Whether a rank that has part `part` of dimension `dim` after may have another coordinate along mesh dimension `m`
  // than `source`.
  bool may_differ(std::size_t dim, std::size_t part, std::size_t m, std::int64_t source) const;

  MeshLayout from_, to_;
  std::vector<DimChange> dims_;
  bool is_empty_ = false;  // whether the tensor has no elements
};

}  // namespace tessera
