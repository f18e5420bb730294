#pragma once
/// \file
/// Sharding specs: how a tensor of any size is cut into shards and where each goes. Pure: a size goes in, metadata
/// comes out, the same on every rank.
///
/// Law: for every spec here and every size that it accepts, `validate_non_overlapping` accepts the shards that
/// `build_metadata` gives, unless they are empty and equal. Law: where `check_tensor` accepts shards that were built by
/// a ChunkShardingSpec in which some dimension is cut, `infer_sharding_spec(shards)` is that spec with `dim >= 0`.
///
/// A user's own spec is a class derived from `ShardingSpec`; its `kind` is what ops are registered for.
/// Immutable; any number of threads may read one. PyTorch: torch/distributed/_shard/sharding_spec/api.py,
/// chunk_sharding_spec.py.

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/layout/remote_device.h"
#include "tessera/layout/shard_metadata.h"

namespace tessera {

class ShardingSpec {
 public:
  virtual ~ShardingSpec() = default;
  /// One name for all specs of a class: "ChunkShardingSpec".
  virtual std::string_view kind() const = 0;
  /// How a tensor of `size` is cut. Throws `Error(invalid_argument)` where this spec can't cut it.
  virtual ShardedTensorMetadata build_metadata(std::span<const std::int64_t> size,
                                               const TensorProperties& properties) const = 0;
  virtual bool equals(const ShardingSpec& other) const = 0;
  virtual std::string to_string() const = 0;
};

inline bool operator==(const ShardingSpec& a, const ShardingSpec& b) { return a.equals(b); }

/// Cuts one dimension as `torch.chunk` does: for n placements, ceil(size / n) rows each, the last ones fewer or none.
/// Shard i is at placement i and begins at row i * ceil(size / n), even where that is past the end and the shard empty.
class ChunkShardingSpec final : public ShardingSpec {
 public:
  static constexpr std::string_view kKind = "ChunkShardingSpec";

  /// \param dim counts from the end if negative; whether a tensor has it is known only when it is cut.
  /// Throws `Error(invalid_argument)` without placements.
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

/// Shards one by one, for tensors of one size.
class EnumerableShardingSpec final : public ShardingSpec {
 public:
  static constexpr std::string_view kKind = "EnumerableShardingSpec";

  /// Throws `Error(invalid_argument)` without shards, for shards of different rank, and for shards that overlap.
  explicit EnumerableShardingSpec(std::vector<ShardMetadata> shards);

  const std::vector<ShardMetadata>& shards() const { return shards_; }

  std::string_view kind() const override { return kKind; }
  /// Throws as `check_tensor`.
  ShardedTensorMetadata build_metadata(std::span<const std::int64_t> size,
                                       const TensorProperties& properties) const override;
  bool equals(const ShardingSpec& other) const override;
  std::string to_string() const override;

 private:
  std::vector<ShardMetadata> shards_;
};

/// The spec that gives these shards: a ChunkShardingSpec, its placements in the order of the shards' offsets, if they
/// are cut in one dimension as that cuts, else an EnumerableShardingSpec of them. Shards that all begin at 0 tell no
/// dimension. Throws as their constructors, and where a shard of a ChunkShardingSpec has no placement.
std::shared_ptr<const ShardingSpec> infer_sharding_spec(std::span<const ShardMetadata> shards);

}  // namespace tessera
