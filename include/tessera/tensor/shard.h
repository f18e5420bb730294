#pragma once
/// \file
/// One shard of a sharded tensor, of this rank or of another.
///
/// Plain values. PyTorch: torch/distributed/_shard/sharded_tensor/shard.py.

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "tessera/comm/rpc.h"
#include "tessera/layout/shard_metadata.h"

namespace tessera {

struct Shard {
  at::Tensor tensor;
  ShardMetadata metadata;

  /// A shard of this rank: the tensor's sizes at `offsets`, on its device. Throws `Error(invalid_argument)` for another
  /// number of offsets than dimensions.
  static Shard from_tensor_and_offsets(const at::Tensor& tensor, std::vector<std::int64_t> offsets, int rank);
};

/// A shard that another rank has. Law: its elements live at the owner as long as the sharded tensor there or any copy
/// of this does. PyTorch: an `RRef[Shard]`.
class RemoteShard {
 public:
  RemoteShard(ShardMetadata metadata, RemoteTensor tensor)
      : metadata_(std::move(metadata)), tensor_(std::move(tensor)) {}

  const ShardMetadata& metadata() const { return metadata_; }
  /// Its rank in the world.
  int owner() const { return tensor_.owner(); }
  /// A copy of the shard as it is at the owner now; the owner does nothing for it. Blocks for up to `timeout`, that of
  /// RPC unless given. Throws `Error(rank_failure)` naming shard and owner if that died or doesn't answer, and
  /// `Error(invalid_argument)` after RPC has ended.
  Shard fetch(std::optional<std::chrono::milliseconds> timeout = std::nullopt) const;

 private:
  ShardMetadata metadata_;
  RemoteTensor tensor_;
};

}  // namespace tessera
