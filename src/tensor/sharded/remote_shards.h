#pragma once
// The shards of a sharded tensor that other ranks have, and the sharded tensors of this process that know theirs.

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "tessera/tensor/remote_shard.h"
#include "tessera/tensor/sharded_tensor.h"

namespace tessera {

// By world rank, each rank's in the order of its local shards; nothing for a rank that has none.
using RemoteShardsByRank = std::map<int, std::vector<RemoteShard>>;

// What one sharded tensor knows of the others' shards. It is registered under an id, the next one of this process, from
// its construction to its destruction; the register doesn't keep it alive.
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

// Tells the sharded tensor of this id what other ranks have of it, in place of what it knew. Throws Error(not_found) if
// there is none, or no more.
void register_remote_shards(std::int64_t id, RemoteShardsByRank shards);

// How many sharded tensors are registered.
std::size_t registered_sharded_tensors();

// Shares this rank's shards of a tensor with the other ranks of the group and registers theirs. A collective; what is
// wrong on one rank is an error on all.
void share_shards(const RemoteShards& tensor, const ProcessGroup& group, const ShardedTensorMetadata& metadata,
                  const std::vector<Shard>& local_shards);

}  // namespace tessera
