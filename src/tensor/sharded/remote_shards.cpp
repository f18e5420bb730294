#include "tensor/sharded/remote_shards.h"

#include <fmt/ranges.h>

#include <mutex>

#include "tensor/dtensor/placement.h"
#include "tessera/base/error.h"

namespace tessera {

namespace {

struct Register {
  std::mutex mutex;  // guards the members below
  std::int64_t next_id = 0;
  std::map<std::int64_t, std::weak_ptr<RemoteShards>> tensors;
};

// Never destroyed, since a static sharded tensor may outlive it.
Register& the_register() {
  static auto* const tensors = new Register;
  return *tensors;
}

}  // namespace

std::shared_ptr<RemoteShards> RemoteShards::make() {
  Register& known = the_register();
  const std::lock_guard lock(known.mutex);
  std::shared_ptr<RemoteShards> made(new RemoteShards(known.next_id++));
  known.tensors[made->id_] = made;
  return made;
}

RemoteShards::~RemoteShards() {
  Register& known = the_register();
  const std::lock_guard lock(known.mutex);
  known.tensors.erase(id_);
}

void register_remote_shards(std::int64_t id, RemoteShardsByRank shards) {
  Register& known = the_register();
  std::shared_ptr<RemoteShards> tensor;
  {
    const std::lock_guard lock(known.mutex);
    const auto found = known.tensors.find(id);
    if (found == known.tensors.end()) {
      std::vector<std::int64_t> ids;
      for (const auto& [other, unused] : known.tensors) ids.push_back(other);
      fail(ErrorCode::not_found, "register remote shards: no sharded tensor with id {}, expected one of [{}]", id,
           fmt::join(ids, ", "));
    }
    tensor = found->second.lock();
  }
  if (!tensor) {
    fail(ErrorCode::not_found,
         "register remote shards: the sharded tensor with id {} was destroyed, expected a live one", id);
  }
  tensor->by_rank_ = std::move(shards);
}

std::size_t registered_sharded_tensors() {
  Register& known = the_register();
  const std::lock_guard lock(known.mutex);
  return known.tensors.size();
}

void share_shards(const RemoteShards& tensor, const ProcessGroup& group, const ShardedTensorMetadata& metadata,
                  const std::vector<Shard>& local_shards) {
  std::vector<at::Tensor> mine;
  mine.reserve(local_shards.size());
  for (const Shard& shard : local_shards) mine.push_back(shard.tensor);
  const std::vector<std::vector<RemoteTensor>> shared = share_tensors(group, mine);

  group.agree_on("register remote shards", [&] {
    const std::vector<std::vector<std::size_t>> expected = shards_by_rank(metadata.shards_metadata, group);
    RemoteShardsByRank shards;
    for (std::size_t r = 0; r < shared.size(); ++r) {
      if (r == static_cast<std::size_t>(group.rank())) continue;
      const int owner = group.world_ranks()[r];
      if (shared[r].size() != expected[r].size()) {
        fail(ErrorCode::invalid_argument, "rank {} of the world has {} shards, expected {} as in the metadata", owner,
             shared[r].size(), expected[r].size());
      }
      for (std::size_t i = 0; i < shared[r].size(); ++i) {
        shards[owner].emplace_back(metadata.shards_metadata[expected[r][i]], shared[r][i]);
      }
    }
    register_remote_shards(tensor.id(), std::move(shards));
  });
}

}  // namespace tessera
