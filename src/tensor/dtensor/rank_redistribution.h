#pragma once
// This rank's part of a redistribution of a DTensor: what it does itself, and its exchange with other ranks.

#include <cstdint>
#include <memory>
#include <vector>

#include "tensor/sharded/reshard_plan.h"
#include "tessera/layout/mesh_layout.h"
#include "tessera/layout/mesh_redistribution.h"
#include "tessera/tensor/device_mesh.h"

namespace tessera {

struct RankRedistribution {
  MeshRedistribution steps;         // its moves are in `exchange`
  std::vector<LocalBox> has, gets;  // this rank's boxes before and after the moves
  ReshardPlan exchange;             // among the ranks of exchange_group()

  // Moves the moves of `plan`, which may have those of other ranks, too.
  RankRedistribution(MeshRedistribution plan, std::vector<LocalBox> has_in, std::vector<LocalBox> gets_in,
                     const std::vector<std::int64_t>& mesh_shape, std::int64_t rank);
  // Returns the ranks that exchange with this one: along one dimension of the mesh, or all.
  ProcessGroup exchange_group(const DeviceMesh& mesh) const;
};

// Returns the redistribution between two layouts for a rank of their mesh. It is computed once: the latest ones are
// kept, as many as have some ten thousands of moves together. Any number of threads may call it.
std::shared_ptr<const RankRedistribution> redistribution_of(const MeshLayout& from, const MeshLayout& to,
                                                            const std::vector<std::int64_t>& coordinate);

}  // namespace tessera
