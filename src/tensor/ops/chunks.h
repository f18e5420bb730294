#pragma once
// What ops on tensors that are cut by a ChunkShardingSpec, one shard on each rank, need to know of the cut.

#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "tessera/layout/sharding_spec.h"
#include "tessera/tensor/sharded_tensor.h"

namespace tessera::ops {

struct Chunks {
  std::int64_t dim = 0;  // >= 0
  std::vector<RemoteDevice> placements;
  // Along `dim`, of each rank.
  std::vector<std::int64_t> begins, sizes;
  std::vector<int> ranks;  // in the order of the placements
  int rank = 0;            // this one

  std::int64_t begin() const { return begins[static_cast<std::size_t>(rank)]; }
  std::int64_t size() const { return sizes[static_cast<std::size_t>(rank)]; }
  ShardedTensor::SpecPtr along(std::int64_t other_dim) const {
    return std::make_shared<ChunkShardingSpec>(other_dim, placements);
  }
};

// Throws Error(unsupported) on every rank unless `tensor` is cut so. `op` is for messages.
Chunks chunks_of(std::string_view op, const ShardedTensor& tensor);

// `dim` counted from the front. Throws Error(invalid_argument) for one that the tensor hasn't.
std::int64_t checked_dim(std::string_view op, const ShardedTensor& tensor, std::int64_t dim);

// With one shard on each rank, of which `local` is this rank's.
ShardedTensor with_chunks(const at::Tensor& local, ShardedTensor::SpecPtr spec, ShardedTensor::Sizes size,
                          const ShardedTensor& like);

}  // namespace tessera::ops
