#include "tensor/dtensor/placement.h"

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/comm/rpc.h"
#include "tessera/layout/coverage.h"
#include "tessera/tensor/torch_types.h"

namespace tessera {

namespace {

int rank_of_worker(const ShardMetadata& shard, const ProcessGroup& group) {
  if (!is_rpc_initialized()) {
    fail(ErrorCode::invalid_argument,
         "shard {}: RPC is not initialized, expected a call of init_rpc before shards are placed by worker name",
         to_string(shard));
  }
  const std::optional<int> world_rank = find_rpc_worker(*shard.placement->worker_name());
  if (!world_rank)
    fail(ErrorCode::invalid_argument, "shard {}: there is no such worker, expected the name of an RPC worker",
         to_string(shard));
  const std::vector<int>& ranks = group.world_ranks();
  const auto found = std::find(ranks.begin(), ranks.end(), *world_rank);
  if (found == ranks.end()) {
    fail(ErrorCode::invalid_argument,
         "shard {}: its worker is rank {} of the world, expected a rank of the process group", to_string(shard),
         *world_rank);
  }
  return static_cast<int>(found - ranks.begin());
}

}  // namespace

int rank_of(const ShardMetadata& shard, const ProcessGroup& group) {
  if (!shard.placement)
    fail(ErrorCode::invalid_argument, "shard {}: it has no placement, expected one with a rank", to_string(shard));
  if (shard.placement->worker_name()) return rank_of_worker(shard, group);
  const std::optional<std::int64_t> rank = shard.placement->rank();
  if (!rank)
    fail(ErrorCode::invalid_argument, "shard {}: its placement has no rank, expected a rank of the process group",
         to_string(shard));
  if (*rank >= group.size()) {
    fail(ErrorCode::invalid_argument, "shard {}: rank {} is not in the process group, expected 0 to {}",
         to_string(shard), *rank, group.size() - 1);
  }
  return static_cast<int>(*rank);
}

std::vector<std::vector<std::size_t>> shards_by_rank(const std::vector<ShardMetadata>& shards,
                                                     const ProcessGroup& group) {
  std::vector<std::vector<std::size_t>> by_rank(static_cast<std::size_t>(group.size()));
  for (std::size_t i = 0; i < shards.size(); ++i) {
    by_rank[static_cast<std::size_t>(rank_of(shards[i], group))].push_back(i);
  }
  return by_rank;
}

BoxList boxes_of(const std::vector<ShardMetadata>& shards, std::size_t dims) {
  BoxList boxes(dims);
  boxes.reserve(shards.size());
  for (const ShardMetadata& shard : shards) boxes.push_back(shard.box());
  return boxes;
}

at::Device staging_device(const std::vector<ShardMetadata>& shards) {
  return shards.empty() ? at::Device(at::kCPU) : at::Device(to_device(shards[0].placement->device()).type());
}

void check_partition(const ShardedTensorMetadata& metadata, std::string_view what) {
  const BoxList boxes = boxes_of(metadata.shards_metadata, metadata.size.size());
  for (std::size_t i = 0; i < boxes.size(); ++i) {
    if (is_empty(boxes[i]) || is_valid(boxes[i], metadata.size)) continue;
    fail(ErrorCode::invalid_argument, "{} a tensor of size {}: shard {}, expected one within the tensor", what,
         shape_to_string(metadata.size), to_string(metadata.shards_metadata[i]));
  }
  if (const auto pair = find_overlap(boxes)) {
    fail(ErrorCode::invalid_argument, "{} a tensor of size {}: shards {} and {} overlap, expected a partition", what,
         shape_to_string(metadata.size), to_string(metadata.shards_metadata[pair->first]),
         to_string(metadata.shards_metadata[pair->second]));
  }
  BoxList filled(metadata.size.size());
  for (std::size_t i = 0; i < boxes.size(); ++i) {
    if (!is_empty(boxes[i])) filled.push_back(boxes[i]);
  }
  if (const auto hole = find_hole(metadata.size, filled)) {
    fail(ErrorCode::invalid_argument, "{} a tensor of size {}: no shard has {}, expected a partition", what,
         shape_to_string(metadata.size), to_string(*hole));
  }
}

}  // namespace tessera
