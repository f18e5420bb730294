#pragma once
/// \file
/// A reference to a shard of a sharded tensor on another rank.
///
/// Law: the owner keeps the elements as long as the owner's sharded tensor or any copy of this reference exists.
/// PyTorch: an `RRef[Shard]`, in torch/distributed/_shard/sharded_tensor/api.py.

#include <chrono>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "tessera/comm/rpc.h"
#include "tessera/layout/shard_metadata.h"
#include "tessera/tensor/shard.h"

namespace tessera {

class RemoteShard {
 public:
  RemoteShard(ShardMetadata metadata, RemoteTensor tensor)
      : metadata_(std::move(metadata)), tensor_(std::move(tensor)) {}

  const ShardMetadata& metadata() const { return metadata_; }
  /// Returns the owner's rank in the world.
  int owner() const { return tensor_.owner(); }
  /// Copies the shard from the owner, with its current elements. The owner need not call anything. Blocks for up to
  /// `timeout`, by default that of RPC. If the owner died or does not answer, throws `Error(rank_failure)` naming shard
  /// and owner. After RPC was shut down, throws `Error(invalid_argument)`.
  Shard fetch(std::optional<std::chrono::milliseconds> timeout = std::nullopt) const;

 private:
  ShardMetadata metadata_;
  RemoteTensor tensor_;
};

}  // namespace tessera
