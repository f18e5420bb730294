#pragma once
// Specs of every kind, and tensors whose elements say where they belong.

#include <ATen/ATen.h>

#include <memory>
#include <string>
#include <vector>

#include "tensor/box_view.h"
#include "tessera/layout/sharding_spec.h"
#include "tessera/tensor/sharded_tensor.h"

namespace tessera::testing {

using Sizes = std::vector<std::int64_t>;
using SpecPtr = ShardedTensor::SpecPtr;

inline RemoteDevice on_rank(int rank) { return {rank, Device{}}; }

inline SpecPtr chunk_spec(std::int64_t dim, const std::vector<int>& ranks) {
  std::vector<RemoteDevice> placements;
  for (const int rank : ranks) placements.push_back(on_rank(rank));
  return std::make_shared<ChunkShardingSpec>(dim, placements);
}

// A grid of cells of `cell`, the last ones smaller, dealt out to `ranks` in turn.
inline SpecPtr grid_spec(const Sizes& size, const Sizes& cell, const std::vector<int>& ranks) {
  std::vector<ShardMetadata> shards;
  Sizes offsets(size.size(), 0);
  for (;;) {
    Sizes sizes;
    for (std::size_t d = 0; d < size.size(); ++d) sizes.push_back(std::min(cell[d], size[d] - offsets[d]));
    shards.emplace_back(offsets, sizes, on_rank(ranks[shards.size() % ranks.size()]));
    std::size_t d = size.size();
    while (d > 0 && (offsets[d - 1] += cell[d - 1]) >= size[d - 1]) offsets[--d] = 0;
    if (d == 0) break;
  }
  return std::make_shared<EnumerableShardingSpec>(shards);
}

// Each dimension in chunks with placements in both orders, a grid over all ranks, one over the odd ones, all on one
// rank.
inline std::vector<SpecPtr> specs_of_every_kind(const Sizes& size, int world) {
  std::vector<int> ranks, backwards, odd;
  for (int r = 0; r < world; ++r) {
    ranks.push_back(r);
    backwards.insert(backwards.begin(), r);
    if (r % 2 == 1 || world == 1) odd.push_back(r);
  }
  std::vector<SpecPtr> specs;
  for (std::size_t d = 0; d < size.size(); ++d) {
    specs.push_back(chunk_spec(static_cast<std::int64_t>(d), ranks));
    specs.push_back(chunk_spec(static_cast<std::int64_t>(d) - static_cast<std::int64_t>(size.size()), backwards));
  }
  Sizes cell;
  for (const std::int64_t n : size) cell.push_back((n + 1) / 2);
  specs.push_back(grid_spec(size, cell, ranks));
  specs.push_back(grid_spec(size, cell, odd));
  specs.push_back(grid_spec(size, size, {world - 1}));
  return specs;
}

// Every element is its index in row-major order.
inline at::Tensor indexed(const Sizes& size, at::ScalarType dtype = at::kLong) {
  std::int64_t count = 1;
  for (const std::int64_t n : size) count *= n;
  return at::arange(count, at::kLong).view(size).to(dtype);
}

inline void fill_with_indices(const ShardedTensor& tensor) {
  const at::Tensor whole = indexed(tensor.size(), tensor.scalar_type());
  for (const Shard& shard : tensor.local_shards()) {
    if (shard.tensor.numel() != 0) shard.tensor.detach().copy_(box_view(whole, shard.metadata.box()));
  }
}

// That each shard of this rank has what belongs there.
inline bool holds_indices(const ShardedTensor& tensor) {
  const at::Tensor whole = indexed(tensor.size(), tensor.scalar_type());
  for (const Shard& shard : tensor.local_shards()) {
    if (shard.tensor.numel() != 0 && !at::equal(shard.tensor, box_view(whole, shard.metadata.box()))) return false;
  }
  return true;
}

}  // namespace tessera::testing
