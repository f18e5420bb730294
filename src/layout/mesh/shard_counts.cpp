#include "tessera/layout/shard_counts.h"

namespace tessera {

std::vector<std::vector<std::size_t>> dim_map(const MeshLayout& layout) {
  std::vector<std::vector<std::size_t>> map(layout.size().size());
  for (std::size_t m = 0; m < layout.placements().size(); ++m) {
    const Placement& placement = layout.placements()[m];
    if (placement.is_shard()) map[static_cast<std::size_t>(placement.dim())].push_back(m);
  }
  return map;
}

std::vector<std::int64_t> num_shards_map(const MeshLayout& layout) {
  std::vector<std::int64_t> counts;
  for (const std::vector<std::size_t>& mesh_dims : dim_map(layout)) {
    std::int64_t count = 1;
    for (const std::size_t m : mesh_dims) count *= layout.mesh_shape()[m];
    counts.push_back(count);
  }
  return counts;
}

std::int64_t num_shards(const MeshLayout& layout) {
  std::int64_t shards = 1;
  for (const std::int64_t count : num_shards_map(layout)) shards *= count;
  return shards;
}

}  // namespace tessera
