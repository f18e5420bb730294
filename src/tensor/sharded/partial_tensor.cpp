#include "tessera/tensor/partial_tensor.h"

#include <ATen/ops/cat.h>

#include "tensor/dtensor/placement.h"
#include "tensor/ops/chunks.h"
#include "tensor/sharded/state.h"
#include "tessera/base/error.h"
#include "tessera/comm/functional.h"
#include "tessera/tensor/torch_types.h"

namespace tessera {

PartialTensor::PartialTensor(const ProcessGroup& group, const at::Tensor& local) : group_(group), local_(local) {}

at::Tensor PartialTensor::all_reduce() const { return functional::all_reduce(group_, local_); }

ShardedTensor PartialTensor::reshard(ShardedTensor::SpecPtr spec) const {
  ShardedTensor::Sizes size;
  ShardedTensorMetadata metadata;
  group_.check_call("reshard a partial tensor", [&](CallArguments& arguments) {
    if (!local_.defined())
      fail(ErrorCode::invalid_argument, "reshard a partial tensor: its local tensor is undefined, expected a tensor");
    require_spec(spec);
    size = local_.sizes().vec();
    if (spec->kind() != ChunkShardingSpec::kKind) {
      fail(ErrorCode::unsupported,
           "reshard a partial tensor of size {}: {} is not supported, expected ChunkShardingSpec",
           shape_to_string(size), spec->kind());
    }
    metadata = metadata_by(spec, size, properties_of(local_));
    const auto of_ranks = shards_by_rank(metadata.shards_metadata, group_);
    for (std::size_t r = 0; r < of_ranks.size(); ++r) {
      if (of_ranks[r].size() == 1) continue;
      fail(ErrorCode::unsupported, "reshard a partial tensor by {}: rank {} gets {} shards, expected one on each rank",
           spec->to_string(), r, of_ranks[r].size());
    }
    arguments.add("spec", comparable_text(*spec)).add("metadata", comparable_text(metadata));
  });
  const auto by_rank = shards_by_rank(metadata.shards_metadata, group_);
  std::int64_t dim = static_cast<const ChunkShardingSpec&>(*spec).dim();
  if (dim < 0) dim += local_.dim();

  // Pads each rank's part to the size of the largest, so that one reduce-scatter suffices: rows of [ranks, part].
  const std::int64_t rows = metadata.shards_metadata[0].shard_sizes[static_cast<std::size_t>(dim)];
  std::vector<at::Tensor> parts;
  std::int64_t own_rows = 0;
  for (std::size_t r = 0; r < by_rank.size(); ++r) {
    const ShardMetadata& shard = metadata.shards_metadata[by_rank[r][0]];
    const std::int64_t count = shard.shard_sizes[static_cast<std::size_t>(dim)];
    const std::int64_t begin = std::min(shard.shard_offsets[static_cast<std::size_t>(dim)], local_.size(dim));
    at::Tensor part = local_.narrow(dim, begin, count);
    if (count < rows) {
      std::vector<std::int64_t> missing = part.sizes().vec();
      missing[static_cast<std::size_t>(dim)] = rows - count;
      part = at::cat({part, part.new_zeros(missing)}, dim);
    }
    parts.push_back(part.unsqueeze(0));
    if (static_cast<int>(r) == group_.rank()) own_rows = count;
  }
  const at::Tensor sum = functional::reduce_scatter(group_, at::cat(parts)).squeeze(0).narrow(dim, 0, own_rows);
  return ShardedTensor::from_local_tensor(sum.contiguous(), std::move(spec), size, group_);
}

}  // namespace tessera
