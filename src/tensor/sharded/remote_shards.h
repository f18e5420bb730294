#pragma once
// References to the shards of other ranks, and the register of this process's sharded tensors that have them.

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "tessera/tensor/remote_shard.h"
#include "tessera/tensor/sharded_tensor.h"

namespace tessera {

// By world rank, in the order of that rank's local shards. Ranks without shards have no entry.
using RemoteShardsByRank = std::map<int, std::vector<RemoteShard>>;

// One sharded tensor's references to other ranks' shards. It is registered under an id, counted up in this process,
// from construction to destruction. The register does not keep it alive.
class RemoteShards {
 public:
  static std::shared_ptr<RemoteShards> make();
  RemoteShards(const RemoteShards&) = delete;
  RemoteShards& operator=(const RemoteShards&) = delete;
  ~RemoteShards();

  std::int64_t id() const { return id_; }
  const RemoteShardsByRank& by_rank() const { return by_rank_; }

 private:
  explicit RemoteShards(std::int64_t id) : id_(id) {}
  friend void register_remote_shards(std::int64_t id, RemoteShardsByRank shards);

  std::int64_t id_;
  RemoteShardsByRank by_rank_;
};

// Replaces the references of the sharded tensor of this id. Throws Error(not_found) if there is none or it was
// destroyed.
void register_remote_shards(std::int64_t id, RemoteShardsByRank shards);

// Returns the number of registered sharded tensors.
std::size_t registered_sharded_tensors();

// Shares this rank's shards of a tensor with the other ranks of the group and registers theirs. A collective: if any
// rank fails, every rank throws.
void share_shards(const RemoteShards& tensor, const ProcessGroup& group, const ShardedTensorMetadata& metadata,
                  const std::vector<Shard>& local_shards);

}  // namespace tessera
