#include "tensor/ops/chunks.h"

#include <ATen/OpMathType.h>

#include "tensor/dtensor/placement.h"
#include "tessera/base/error.h"
#include "tessera/tensor/op.h"

namespace tessera::ops {

Chunks chunks_of(std::string_view op, const ShardedTensor& tensor) {
  const auto* spec = dynamic_cast<const ChunkShardingSpec*>(&tensor.sharding_spec());
  if (spec == nullptr) {
    fail(ErrorCode::unsupported, "op '{}' of {}: the spec is not supported, expected ChunkShardingSpec", op,
         describe(tensor));
  }
  Chunks chunks;
  chunks.dim = checked_dim(op, tensor, spec->dim());
  chunks.placements = spec->placements();
  for (const RemoteDevice& placement : chunks.placements) chunks.comparable.push_back(placement.without_index());
  chunks.rank = tensor.process_group().rank();
  const std::vector<ShardMetadata>& shards = tensor.metadata().shards_metadata;
  const auto by_rank = shards_by_rank(shards, tensor.process_group());
  for (std::size_t r = 0; r < by_rank.size(); ++r) {
    if (by_rank[r].size() != 1) {
      fail(ErrorCode::unsupported, "op '{}' of {}: rank {} has {} shards, expected one on each rank", op,
           describe(tensor), r, by_rank[r].size());
    }
    const ShardMetadata& shard = shards[by_rank[r][0]];
    chunks.begins.push_back(shard.shard_offsets[static_cast<std::size_t>(chunks.dim)]);
    chunks.sizes.push_back(shard.shard_sizes[static_cast<std::size_t>(chunks.dim)]);
  }
  for (const ShardMetadata& shard : shards) chunks.ranks.push_back(rank_of(shard, tensor.process_group()));
  return chunks;
}

std::int64_t checked_dim(std::string_view op, const ShardedTensor& tensor, std::int64_t dim) {
  const auto dims = static_cast<std::int64_t>(tensor.size().size());
  if (dim < -dims || dim >= dims) {
    fail(ErrorCode::invalid_argument, "op '{}' of {}: dimension {}, expected {} to {}", op, describe(tensor), dim,
         -dims, dims - 1);
  }
  return dim < 0 ? dim + dims : dim;
}

at::Tensor widened(const at::Tensor& tensor) { return tensor.to(at::toOpMathType(tensor.scalar_type())); }

at::Tensor narrowed_as(const at::Tensor& input, const at::Tensor& result) {
  const at::ScalarType dtype = input.scalar_type();
  return at::toOpMathType(dtype) == dtype ? result : result.to(dtype);
}

ShardedTensor with_chunks(const at::Tensor& local, ShardedTensor::SpecPtr spec, ShardedTensor::Sizes size,
                          const ShardedTensor& like) {
  return ShardedTensor::from_local_tensor(local.contiguous(), std::move(spec), std::move(size), like.process_group(),
                                          like.init_rrefs());
}

}  // namespace tessera::ops
