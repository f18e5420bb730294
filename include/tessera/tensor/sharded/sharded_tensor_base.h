#pragma once
/// \file
/// A sharded tensor without a process group: the metadata of the tensor, and as many of its shards, of any ranks, as
/// this process has.
///
///     const auto tensor = ShardedTensorBase::from_local_shards_and_global_metadata(shards_of_all_ranks, metadata);
///     save({{"weight", tensor}}, "checkpoint");  // as if each rank had saved its shards
///
/// For programs that make, inspect or convert the state of a training without its ranks. PyTorch: ShardedTensorBase in
/// torch/distributed/_shard/sharded_tensor/api.py.

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <vector>

#include "tessera/layout/shard_metadata.h"
#include "tessera/layout/sharding_spec.h"
#include "tessera/tensor/checkpointable.h"
#include "tessera/tensor/shard.h"

namespace tessera {

class ShardedTensorBase final : public Checkpointable {
 public:
  /// Creates a tensor of these shards, which may be views of another tensor. Their placements may name any ranks; a
  /// shard must be on the device of its placement. The spec is inferred unless given. Throws `Error(invalid_argument)`
  /// unless the shards of the metadata partition the tensor, and each of `local_shards` is one of them, given once,
  /// with a tensor of its size and of the dtype and requires_grad of the metadata. PyTorch:
  /// _init_from_local_shards_and_global_metadata.
  static std::shared_ptr<ShardedTensorBase> from_local_shards_and_global_metadata(
      std::vector<Shard> local_shards, ShardedTensorMetadata metadata,
      std::shared_ptr<const ShardingSpec> spec = nullptr);

  const ShardedTensorMetadata& metadata() const { return metadata_; }
  const ShardingSpec& sharding_spec() const { return *spec_; }
  const std::vector<Shard>& local_shards() const { return local_shards_; }

  const std::vector<std::int64_t>& size() const override { return metadata_.size; }
  std::optional<TensorProperties> properties() const override { return metadata_.tensor_properties; }
  const std::vector<Box>& local_chunks() const override { return boxes_; }
  /// Throws `Error(invalid_argument)` unless local_shards() has a shard `i`.
  at::Tensor local_tensor(std::size_t i) const override;

 private:
  ShardedTensorBase() = default;

  ShardedTensorMetadata metadata_;
  std::shared_ptr<const ShardingSpec> spec_;
  std::vector<Shard> local_shards_;
  std::vector<Box> boxes_;  // of the local shards
};

}  // namespace tessera
