#pragma once
/// \file
/// What is known of a sharded tensor without any of its elements: its shards' boxes and where they are.
///
/// Shards are validated in two steps, as PyTorch does it: `validate_non_overlapping`, then `check_tensor`, which
/// together say that the shards partition the tensor.
/// Plain values. PyTorch: torch/distributed/_shard/metadata.py, _shard/sharded_tensor/metadata.py,
/// _shard/sharding_spec/_internals.py.

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

/// One shard: the box of the tensor that it holds, in elements, and where it is.
struct ShardMetadata {
  std::vector<std::int64_t> shard_offsets;
  std::vector<std::int64_t> shard_sizes;
  std::optional<RemoteDevice> placement;

  ShardMetadata() = default;
  /// Throws `Error(invalid_argument)` unless offsets and sizes are equally many and none is negative.
  ShardMetadata(std::vector<std::int64_t> offsets, std::vector<std::int64_t> sizes,
                std::optional<RemoteDevice> placement_in = std::nullopt);

  BoxView box() const { return {shard_offsets, shard_sizes}; }
  std::size_t rank() const { return shard_sizes.size(); }
  bool operator==(const ShardMetadata&) const = default;
};

/// "[0, 4)x[2, 6) on rank:0/cpu"
std::string to_string(const ShardMetadata& shard);
std::ostream& operator<<(std::ostream& out, const ShardMetadata& shard);

struct ShardedTensorMetadata {
  std::vector<ShardMetadata> shards_metadata;
  std::vector<std::int64_t> size;  ///< of the whole tensor
  TensorProperties tensor_properties;
  bool operator==(const ShardedTensorMetadata&) const = default;
};

/// A line for the tensor and one for each shard.
std::string to_string(const ShardedTensorMetadata& metadata);

/// Throws `Error(invalid_argument)` naming two shards that overlap, or two of different rank. Shards that are equal
/// overlap, even empty ones; an empty shard overlaps a shard within which it lies, not one that it touches. O(n log n)
/// for shards that are cut in one dimension, else as `find_overlap`.
void validate_non_overlapping(std::span<const ShardMetadata> shards);

/// Throws `Error(invalid_argument)` unless there is a shard, every shard is of the rank of `size` and ends within it,
/// and the shards' volumes add up to its volume. For shards that don't overlap that says that they cover it; where they
/// don't, the error names a box that is missing.
void check_tensor(std::span<const ShardMetadata> shards, std::span<const std::int64_t> size);

}  // namespace tessera
