#pragma once
/// \file
/// Metadata of a sharded tensor: its size, its properties, and the box and location of each shard.
///
/// Shards are validated in two steps, as in PyTorch: `validate_non_overlapping`, then `check_tensor`. Shards that pass
/// both partition the tensor. Plain values. PyTorch: torch/distributed/_shard/metadata.py,
/// _shard/sharded_tensor/metadata.py, _shard/sharding_spec/_internals.py.

#include <cstdint>
#include <iosfwd>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tessera/layout/box.h"
#include "tessera/layout/remote_device.h"
#include "tessera/layout/tensor_properties.h"

namespace tessera {

/// One shard: the box of the tensor that it holds, in elements, and its location.
struct ShardMetadata {
  std::vector<std::int64_t> shard_offsets;
  std::vector<std::int64_t> shard_sizes;
  std::optional<RemoteDevice> placement;

  ShardMetadata() = default;
  /// Throws `Error(invalid_argument)` if offsets and sizes differ in number or one is negative.
  ShardMetadata(std::vector<std::int64_t> offsets, std::vector<std::int64_t> sizes,
                std::optional<RemoteDevice> placement_in = std::nullopt);

  BoxView box() const { return {shard_offsets, shard_sizes}; }
  std::size_t rank() const { return shard_sizes.size(); }
  bool operator==(const ShardMetadata&) const = default;
};

/// Returns "[0, 4)x[2, 6) on rank:0/cpu".
std::string to_string(const ShardMetadata& shard);
std::ostream& operator<<(std::ostream& out, const ShardMetadata& shard);

/// A sharded tensor without its elements, equal on all ranks except for the indices of devices (see `comparable_text`).
struct ShardedTensorMetadata {
  std::vector<ShardMetadata> shards_metadata;
  std::vector<std::int64_t> size;  ///< of the full tensor
  TensorProperties tensor_properties;
  bool operator==(const ShardedTensorMetadata&) const = default;
};

/// Returns one line for the tensor and one for each shard.
std::string to_string(const ShardedTensorMetadata& metadata);
/// As to_string, but without the indices of devices, so that the text is equal on all ranks of a sharded tensor. A rank
/// knows the index only of its own shards' devices: ShardedTensor::to does not communicate, and each rank notes its own
/// current device for all shards. Law: what ranks compare, and what decides which collectives they call, is this text
/// and that of the spec.
std::string comparable_text(const ShardedTensorMetadata& metadata);

/// Throws `Error(invalid_argument)` naming two shards that overlap or have different ranks. Equal shards overlap,
/// unless all are one empty box at offset 0. An empty shard overlaps a shard if it is strictly inside of it, not if it
/// only touches it. Takes O(n log n) for shards split in one dimension, otherwise as long as `find_overlap`.
void validate_non_overlapping(std::span<const ShardMetadata> shards);

/// Throws `Error(invalid_argument)` unless there is a shard, every shard has the rank of `size` and ends within it, and
/// the volumes of the shards add up to the volume of the tensor. Shards that do not overlap and pass this check cover
/// the tensor. If the volumes differ, the error names a missing box.
void check_tensor(std::span<const ShardMetadata> shards, std::span<const std::int64_t> size);

}  // namespace tessera
