// Prints the sum of a sharded tensor of two ranks that was saved and loaded, so that every module on LibTorch is
// linked.

#include <ATen/ATen.h>

#include <iostream>

#include "tessera/comm/local_ranks.h"
#include "tessera/state/load.h"
#include "tessera/state/save.h"
#include "tessera/tensor/ops.h"

int main() {
  using namespace tessera;
  const auto storage = checkpoint::memory_storage();
  run_local(2, [&](const ProcessGroup& group) {
    const auto halves = std::make_shared<ChunkShardingSpec>(
        0, std::vector<RemoteDevice>{RemoteDevice("rank:0/cpu"), RemoteDevice("rank:1/cpu")});
    save({{"sum", ShardedTensor::ones(halves, {4, 3}, group) + 2}}, storage, group);
    const ShardedTensor sum = ShardedTensor::zeros(halves, {4, 3}, group);
    StateDict state{{"sum", sum}};
    load(state, storage, group);
    const at::Tensor whole = group.rank() == 0 ? at::empty({4, 3}) : at::Tensor();
    sum.gather(0, whole);
    if (whole.defined()) std::cout << whole.sum().item<double>() << '\n';
  });
}
