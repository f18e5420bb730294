// Reshards a matrix from rows to columns and checks every element, which is the number of its place, in this rank's
// shards and, by RPC, in those of the others. Rank 0 prints whether the ranks
// share memory.

#include <ATen/ATen.h>

#include <iostream>
#include <optional>

#include "tessera/comm/init.h"
#include "tessera/comm/internal/shared_memory.h"
#include "tessera/comm/rpc.h"
#include "tessera/tensor/remote_shard.h"
#include "tessera/tensor/sharded_tensor.h"

int main() {
  using namespace tessera;
  constexpr std::int64_t kRows = 2048, kColumns = 1024;
  const at::Tensor full = at::arange(kRows * kColumns, at::kFloat).view({kRows, kColumns});
  const auto expected = [&](const Shard& shard) {
    const std::vector<std::int64_t>&offsets = shard.metadata.shard_offsets, &sizes = shard.metadata.shard_sizes;
    return full.narrow(0, offsets[0], sizes[0]).narrow(1, offsets[1], sizes[1]);
  };
  const ProcessGroup group = init_process_group();
  ShardedTensorOptions options;
  options.init_rrefs = is_rpc_available();
  std::optional<Rpc> rpc;
  if (options.init_rrefs) rpc.emplace(init_rpc(group));
  std::vector<RemoteDevice> placements;
  for (int rank = 0; rank < group.size(); ++rank) placements.emplace_back(rank, Device{"cpu"});

  const auto by_rows = std::make_shared<ChunkShardingSpec>(0, placements);
  ShardedTensor matrix = ShardedTensor::zeros(by_rows, {kRows, kColumns}, group, options);
  for (const Shard& shard : matrix.local_shards()) shard.tensor.copy_(expected(shard));
  matrix.reshard(std::make_shared<ChunkShardingSpec>(1, placements));

  bool is_right = true;
  for (const Shard& shard : matrix.local_shards()) is_right = is_right && shard.tensor.equal(expected(shard));
  if (rpc) {
    for (const auto& [owner, shards] : matrix.remote_shards()) {
      for (const RemoteShard& shard : shards) {
        const Shard fetched = shard.fetch();
        is_right = is_right && fetched.tensor.equal(expected(fetched));
      }
    }
    rpc->shutdown();
  }
  if (!is_right) std::cout << "reshard: wrong elements on rank " << group.rank() << "\n";
  if (group.rank() == 0) {
    std::cout << (comm::SharedMemory::is_available(group) ? "memory is shared\n" : "no memory is shared\n");
  }
  return is_right ? 0 : 1;
}
