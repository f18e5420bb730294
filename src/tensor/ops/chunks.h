#pragma once
// The chunks of a tensor that is sharded by a ChunkShardingSpec with one shard on each rank.

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
  std::vector<RemoteDevice> comparable;  // placements without the indices of devices
  // Of each rank, along `dim`.
  std::vector<std::int64_t> begins, sizes;
  std::vector<int> ranks;  // in the order of the placements
  int rank = 0;            // this rank

  std::int64_t begin() const { return begins[static_cast<std::size_t>(rank)]; }
  std::int64_t size() const { return sizes[static_cast<std::size_t>(rank)]; }
  ShardedTensor::SpecPtr along(std::int64_t other_dim) const {
    return std::make_shared<ChunkShardingSpec>(other_dim, placements);
  }
};

// Throws Error(unsupported) on every rank unless `tensor` is sharded like this. `op` is for messages.
Chunks chunks_of(std::string_view op, const ShardedTensor& tensor);

// Returns `dim` counted from the front. Throws Error(invalid_argument) if it is out of range.
std::int64_t checked_dim(std::string_view op, const ShardedTensor& tensor, std::int64_t dim);

// Returns the tensor in the dtype in which LibTorch computes sums of its elements, over ranks too: float32 for half
// precision, which would overflow or round.
at::Tensor widened(const at::Tensor& tensor);
// Returns a result that was computed from widened(input) in half precision, if `input` is.
at::Tensor narrowed_as(const at::Tensor& input, const at::Tensor& result);

// Creates a tensor with one shard on each rank, on this rank `local`.
ShardedTensor with_chunks(const at::Tensor& local, ShardedTensor::SpecPtr spec, ShardedTensor::Sizes size,
                          const ShardedTensor& like);

}  // namespace tessera::ops
