#pragma once
// Specs of every kind, and tensors whose elements are their indices.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "tessera/layout/sharding_spec.h"
#include "tessera/tensor/internal/box_view.h"
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

// A grid of cells of size `cell`, smaller at the end, assigned to `ranks` round-robin.
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

// Chunks of each dimension with placements in both orders, a grid over all ranks, one over the odd ranks, and all on
// one rank.
inline std::vector<SpecPtr> specs_of_every_kind(const Sizes& size, int world) {
  std::vector<int> ranks, descending, odd;
  for (int r = 0; r < world; ++r) {
    ranks.push_back(r);
    descending.insert(descending.begin(), r);
    if (r % 2 == 1 || world == 1) odd.push_back(r);
  }
  std::vector<SpecPtr> specs;
  for (std::size_t d = 0; d < size.size(); ++d) {
    specs.push_back(chunk_spec(static_cast<std::int64_t>(d), ranks));
    specs.push_back(chunk_spec(static_cast<std::int64_t>(d) - static_cast<std::int64_t>(size.size()), descending));
  }
  Sizes cell;
  for (const std::int64_t n : size) cell.push_back((n + 1) / 2);
  specs.push_back(grid_spec(size, cell, ranks));
  specs.push_back(grid_spec(size, cell, odd));
  specs.push_back(grid_spec(size, size, {world - 1}));
  return specs;
}

// Every element is its index in row-major order.
inline at::Tensor indices(const Sizes& size, at::ScalarType dtype = at::kLong) {
  std::int64_t count = 1;
  for (const std::int64_t n : size) count *= n;
  return at::arange(count, at::kLong).view(size).to(dtype);
}

// Returns a copy that requires grad.
inline at::Tensor leaf(const at::Tensor& tensor) { return tensor.detach().clone().set_requires_grad(true); }

inline void fill_with_indices(const ShardedTensor& tensor) {
  const at::Tensor full = indices(tensor.size(), tensor.scalar_type());
  for (const Shard& shard : tensor.local_shards()) {
    if (shard.tensor.numel() != 0) shard.tensor.detach().copy_(box_view(full, shard.metadata.box()));
  }
}

// Returns whether each shard of this rank has the right elements.
inline bool holds_indices(const ShardedTensor& tensor) {
  const at::Tensor full = indices(tensor.size(), tensor.scalar_type());
  for (const Shard& shard : tensor.local_shards()) {
    if (shard.tensor.numel() != 0 && !at::equal(shard.tensor, box_view(full, shard.metadata.box()))) return false;
  }
  return true;
}

// Shards a tensor that every rank has in full, without communication.
inline ShardedTensor shard(const at::Tensor& full, const SpecPtr& spec, const ProcessGroup& group) {
  ShardedTensorOptions options;
  options.dtype = full.scalar_type();
  ShardedTensor tensor = ShardedTensor::empty(spec, full.sizes().vec(), group, options);
  for (const Shard& part : tensor.local_shards()) {
    if (part.tensor.numel() != 0) part.tensor.copy_(box_view(full.detach(), part.metadata.box()));
  }
  tensor.set_requires_grad(full.requires_grad());
  return tensor;
}

// Returns the full tensor on every rank.
inline at::Tensor full_of(const ShardedTensor& tensor) {
  const ProcessGroup& group = tensor.process_group();
  const at::Tensor out = at::empty(tensor.size(), at::TensorOptions().dtype(tensor.scalar_type()));
  tensor.gather(0, group.rank() == 0 ? out : at::Tensor());
  group.broadcast(out, 0);
  return out;
}

// Normally distributed; the same for the same seed.
inline at::Tensor random(const Sizes& size, std::uint64_t seed, at::ScalarType dtype = at::kDouble) {
  at::Generator generator = at::detail::createCPUGenerator(seed);
  return at::randn(size, generator, at::TensorOptions().dtype(dtype));
}

// Equal up to rounding of double.
inline bool close(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && at::allclose(a, b, 1e-9, 1e-12);
}

inline std::vector<int> ranks_of(int world) {
  std::vector<int> ranks(static_cast<std::size_t>(world));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

// All ranks, out of order.
inline std::vector<int> permuted_ranks(int world) {
  std::vector<int> ranks = ranks_of(world);
  std::reverse(ranks.begin(), ranks.end());
  if (world > 2) std::swap(ranks[0], ranks[1]);
  return ranks;
}

}  // namespace tessera::testing
