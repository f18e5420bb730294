#pragma once
/// \file
/// Sharding specs: rules that split a tensor of any size into shards and place each shard. Pure: the metadata depends
/// on the size alone and is the same on every rank.
///
/// Law: for every spec here and every size that it accepts, `validate_non_overlapping` accepts the shards of
/// `build_metadata`, unless they are empty and equal. Law: if `check_tensor` accepts the shards of a ChunkShardingSpec,
/// and that spec splits some dimension, `infer_sharding_spec(shards)` is the spec with `dim >= 0`.
///
/// A custom spec is a class derived from `ShardingSpec`; ops are registered for its `kind`. Immutable; any number of
/// threads may read a spec. PyTorch: torch/distributed/_shard/sharding_spec/api.py, chunk_sharding_spec.py.

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/layout/remote_device.h"
#include "tessera/layout/shard_metadata.h"

namespace tessera {

/// A rule that splits tensors into shards and places the shards.
class ShardingSpec {
 public:
  virtual ~ShardingSpec() = default;
  /// Returns one name for all specs of a class: "ChunkShardingSpec".
  virtual std::string_view kind() const = 0;
  /// Returns the shards of a tensor of `size`. Throws `Error(invalid_argument)` if this spec cannot shard it.
  virtual ShardedTensorMetadata build_metadata(std::span<const std::int64_t> size,
                                               const TensorProperties& properties) const = 0;
  virtual bool equals(const ShardingSpec& other) const = 0;
  virtual std::string to_string() const = 0;
};

inline bool operator==(const ShardingSpec& a, const ShardingSpec& b) { return a.equals(b); }

/// As `spec.to_string()`, but without the indices of devices, as `comparable_text` of a metadata; `to_string()` itself
/// for a custom spec.
std::string comparable_text(const ShardingSpec& spec);

/// A spec that splits one dimension as `torch.chunk` does: for n placements, ceil(size / n) rows each, fewer or none
/// for the last shards. Shard i is at placement i and begins at row i * ceil(size / n), even if that is past the end
/// and the shard is empty.
class ChunkShardingSpec final : public ShardingSpec {
 public:
  static constexpr std::string_view kKind = "ChunkShardingSpec";

  /// `dim` counts from the end if negative. Whether a tensor has it is checked in `build_metadata`. Throws
  /// `Error(invalid_argument)` without placements.
  ChunkShardingSpec(std::int64_t dim, std::vector<RemoteDevice> placements);

  std::int64_t dim() const { return dim_; }
  const std::vector<RemoteDevice>& placements() const { return placements_; }

  std::string_view kind() const override { return kKind; }
  ShardedTensorMetadata build_metadata(std::span<const std::int64_t> size,
                                       const TensorProperties& properties) const override;
  bool equals(const ShardingSpec& other) const override;
  std::string to_string() const override;

 private:
  std::int64_t dim_;
  std::vector<RemoteDevice> placements_;
};

/// An explicit list of shards, for tensors of one size.
class EnumerableShardingSpec final : public ShardingSpec {
 public:
  static constexpr std::string_view kKind = "EnumerableShardingSpec";

  /// Throws `Error(invalid_argument)` without shards, for shards of different ranks, and for shards that overlap.
  explicit EnumerableShardingSpec(std::vector<ShardMetadata> shards);

  const std::vector<ShardMetadata>& shards() const { return shards_; }

  std::string_view kind() const override { return kKind; }
  /// Throws the errors of `check_tensor`.
  ShardedTensorMetadata build_metadata(std::span<const std::int64_t> size,
                                       const TensorProperties& properties) const override;
  bool equals(const ShardingSpec& other) const override;
  std::string to_string() const override;

 private:
  std::vector<ShardMetadata> shards_;
};

/// Returns the spec of these shards. If they are split in one dimension as a ChunkShardingSpec splits it, returns that
/// spec, with its placements in the order of the shards' offsets; otherwise an EnumerableShardingSpec of the shards. If
/// all shards begin at 0, the dimension is unknown and the result is an EnumerableShardingSpec. Throws the errors of
/// the constructors, and `Error(invalid_argument)` if a shard of a ChunkShardingSpec has no placement.
std::shared_ptr<const ShardingSpec> infer_sharding_spec(std::span<const ShardMetadata> shards);

}  // namespace tessera
