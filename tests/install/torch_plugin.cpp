// Links the modules on LibTorch.

#include <ATen/ATen.h>
#include <torch/nn/modules/batchnorm.h>

#include "tessera/comm/local_ranks.h"
#include "tessera/fsdp/wrap.h"
#include "tessera/state/load.h"
#include "tessera/state/save.h"
#include "tessera/tensor/ops.h"

// Saves and loads a sharded tensor on two ranks, and returns the sum of its elements.
double save_and_load() {
  using namespace tessera;
  fsdp::Wrap<torch::nn::BatchNorm1d> norm{3};  // LibTorch does not export all functions of this class
  double result = 0;
  const auto storage = checkpoint::memory_storage();
  run_local(2, [&](const ProcessGroup& group) {
    const auto halves = std::make_shared<ChunkShardingSpec>(
        0, std::vector<RemoteDevice>{RemoteDevice("rank:0/cpu"), RemoteDevice("rank:1/cpu")});
    save({{"sum", ShardedTensor::ones(halves, {4, 3}, group) + 2}}, storage, group);
    const ShardedTensor sum = ShardedTensor::zeros(halves, {4, 3}, group);
    StateDict state{{"sum", sum}};
    load(state, storage, group);
    const at::Tensor full = group.rank() == 0 ? at::empty({4, 3}) : at::Tensor();
    sum.gather(0, full);
    if (full.defined()) result = full.sum().item<double>() * static_cast<double>(norm->weight.numel()) / 3;
  });
  return result;
}
