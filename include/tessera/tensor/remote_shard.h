#pragma once
/// \file
/// A reference to a shard of a sharded tensor on another rank. PyTorch: an `RRef[Shard]`, in
/// torch/distributed/_shard/sharded_tensor/api.py.

#include <chrono>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "tessera/comm/rpc.h"
#include "tessera/layout/shard_metadata.h"
#include "tessera/tensor/shard.h"

namespace tessera {

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
