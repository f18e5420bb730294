// A matrix sharded over the ranks, first by rows, then by columns.
//
//   tessera run -n 2 -- build/bin/sharded_tensor

#include <ATen/ATen.h>

#include <iostream>

#include "tessera/comm/init.h"
#include "tessera/tensor/sharded_tensor.h"

int main() {
  using namespace tessera;
  const ProcessGroup group = init_process_group();  // as specified by the launcher; one rank without a launcher

  std::vector<RemoteDevice> placements;  // rank:0/cpu, rank:1/cpu, ...
  for (int rank = 0; rank < group.size(); ++rank) placements.emplace_back(rank, Device{"cpu"});
  const auto by_rows = std::make_shared<ChunkShardingSpec>(0, placements);
  const auto by_columns = std::make_shared<ChunkShardingSpec>(1, placements);

  // Each rank allocates only its own rows.
  ShardedTensor matrix = ShardedTensor::zeros(by_rows, {4, 6}, group);
  for (const Shard& shard : matrix.local_shards()) shard.tensor.fill_(group.rank() + 1);
  if (group.rank() == 0) std::cout << matrix << "\n";

  // Elements that move to another rank are sent in one all-to-all.
  matrix.reshard(by_columns);
  if (group.rank() == 0) std::cout << matrix << "\n";

  // Gather the full matrix on rank 0.
  const at::Tensor full = group.rank() == 0 ? at::empty({4, 6}) : at::Tensor();
  matrix.gather(0, full);
  if (group.rank() == 0) std::cout << full.to(at::kInt) << "\n";
}
