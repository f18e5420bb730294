#include "tessera/state/flatten_sharded_tensors.h"

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/state/traverse.h"
#include "tessera/tensor/torch_types.h"

namespace tessera {

namespace {

using Sizes = std::vector<std::int64_t>;

Sizes sum_of(const Sizes& outer, const Sizes& inner) {
  if (outer.size() != inner.size()) {
    fail(ErrorCode::invalid_argument, "the inner tensor has {} dimensions, expected {} as in the outer shard",
         inner.size(), outer.size());
  }
  Sizes sum(outer.size());
  for (std::size_t d = 0; d < outer.size(); ++d) {
    sum[d] = outer[d] + inner[d];  // no overflow: both are inside the tensor, see check_tensor
  }
  return sum;
}

// Returns the inner shard of the only outer shard, as a shard of the full tensor.
ShardedTensor flatten(const NestedShardedTensor& tensor, const ProcessGroup& world) {
  const NestedShard& outer = tensor.local_shards[0];
  const std::vector<Shard>& inner_shards = outer.tensor.local_shards();
  if (inner_shards.size() != 1) {
    fail(ErrorCode::invalid_argument, "the inner tensor has {} local shards, expected 1", inner_shards.size());
  }
  const Shard& inner = inner_shards[0];
  const Device device = to_device(inner.tensor.device());
  const Shard mine{inner.tensor, ShardMetadata(sum_of(outer.metadata.shard_offsets, inner.metadata.shard_offsets),
                                               inner.metadata.shard_sizes, RemoteDevice(world.rank(), device))};
  // Another rank than this one stands for the unknown owners of the other shards.
  const RemoteDevice elsewhere(world.rank() > 0 ? 0 : 1, Device{device.type, device.type == "cpu" ? -1 : 0});

  ShardedTensorMetadata metadata = tensor.metadata;
  std::vector<ShardMetadata>& shards = metadata.shards_metadata;
  const auto flattened = std::find_if(shards.begin(), shards.end(), [&](const ShardMetadata& shard) {
    return shard.shard_offsets == outer.metadata.shard_offsets;
  });
  if (flattened != shards.end()) shards.erase(flattened);
  for (ShardMetadata& shard : shards) shard.placement = elsewhere;
  for (const ShardMetadata& shard : outer.tensor.metadata().shards_metadata) {
    if (shard.shard_offsets == inner.metadata.shard_offsets) continue;
    shards.emplace_back(sum_of(outer.metadata.shard_offsets, shard.shard_offsets), shard.shard_sizes, elsewhere);
  }
  shards.push_back(mine.metadata);
  return ShardedTensor::from_local_shards_and_global_metadata({mine}, std::move(metadata), world);
}

}  // namespace

StateDict flatten_sharded_tensors(const StateDict& state_dict, const ProcessGroup& world) {
  StateDict result;
  traverse_state_dict(state_dict, [&](const Path& path, const Value& value) {
    const auto* nested = value.get_if<NestedShardedTensor>();
    const auto* sharded = value.get_if<ShardedTensor>();
    if ((nested && nested->local_shards.empty()) || (sharded && sharded->local_shards().empty())) return;
    if (!nested || nested->local_shards.size() != 1) return set_element(result, path, value);
    try {
      set_element(result, path, flatten(*nested, world));
    } catch (const Error& error) {
      fail(error.code(), "flatten sharded tensors: '{}': {}", printable(flat_name(path)), error.what());
    }
  });
  return result;
}

}  // namespace tessera
