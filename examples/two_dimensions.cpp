// Trains a small network on a two-dimensional mesh. Its layers are sharded over the ranks that share a batch (tensor
// parallel), and the local tensors are sharded again over ranks with different batches (FSDP). When started again, on
// any mesh, resumes from the last checkpoint.
//
//   tessera run -n 4 -- build/bin/two_dimensions checkpoints 20 2      2 x 2 ranks
//   tessera run -n 3 -- build/bin/two_dimensions checkpoints 40 3      1 x 3, resumes from step 20

#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>
#include <torch/utils.h>

#include <cstdlib>
#include <iostream>

#include "tessera/base/error.h"
#include "tessera/comm/init.h"
#include "tessera/fsdp/fully_sharded_data_parallel.h"
#include "tessera/state/checkpoint_manager.h"
#include "tessera/tensor/tensor_parallel.h"

namespace {

using namespace tessera;

struct MlpImpl : torch::nn::Module {
  explicit MlpImpl(std::int64_t width) : up(width, 4 * width), down(4 * width, width) {
    register_module("up", up);
    register_module("down", down);
  }
  at::Tensor forward(const at::Tensor& x) { return x + down(torch::tanh(up(x))); }
  ParallelLinear up, down;
};
TORCH_MODULE(Mlp);

struct NetworkImpl : torch::nn::Module {
  NetworkImpl() {
    register_module("first", first);
    register_module("second", second);
    register_module("head", head);
  }
  at::Tensor forward(const at::Tensor& x) { return head(second(first(x))); }
  fsdp::Wrap<Mlp> first{8}, second{8};
  torch::nn::Linear head{8, 1};
};
TORCH_MODULE(Network);

constexpr std::int64_t kBatch = 48;  // of all ranks together, so the result does not depend on their number

at::Tensor batch_of(std::int64_t step) {
  torch::manual_seed(static_cast<std::uint64_t>(step) + 1);
  return torch::rand({kBatch, 8}, torch::kDouble).mul_(2).sub_(1);
}

void train(const std::string& directory, std::int64_t steps, int tp) {
  const ProcessGroup group = init_process_group();
  const DeviceMesh mesh(group, {group.size() / tp, tp}, {"dp", "tp"});
  torch::manual_seed(0);
  Network network;
  network->to(torch::kDouble);
  parallelize_module(*network, mesh["tp"], {{"*.up", ColwiseParallel{}}, {"*.down", RowwiseParallel{}}});
  const ProcessGroup& dp = mesh.group("dp");
  fsdp::FullyShardedDataParallel<Network> model(network, dp);
  torch::optim::AdamW optimizer(model.parameters(), torch::optim::AdamWOptions(0.01));

  CheckpointManagerOptions options;
  options.save_every = 10;
  options.warn = [](const std::string& what) { std::cerr << "warning: " << what << "\n"; };
  CheckpointManager manager(directory, group, options);
  const auto state_now = [&] {
    return StateDict{{"model", model.state_dict()}, {"optimizer", model.optim_state_dict(optimizer)}};
  };
  StateDict state = state_now();
  const auto restored = manager.restore_latest(state);
  if (restored) {
    model.load_state_dict(state.at("model").get<Dict>());
    model.load_optim_state_dict(optimizer, state.at("optimizer").get<Dict>());
    if (group.rank() == 0) std::cout << "resumed from step " << *restored << " on " << mesh.to_string() << "\n";
  }
  for (std::int64_t step = restored.value_or(0) + 1; step <= steps; ++step) {
    const at::Tensor mine = batch_of(step).slice(0, dp.rank(), kBatch, dp.size());
    const at::Tensor wanted = mine.prod(1, true).add(mine.sum(1, true));
    optimizer.zero_grad();
    const at::Tensor loss = (model(mine) - wanted).square().sum() * (static_cast<double>(dp.size()) / kBatch);
    loss.backward();  // averaged over the ranks of "dp"
    optimizer.step();
    at::Tensor total = loss.detach() / dp.size();
    dp.all_reduce(total);
    manager.save(step, state_now(), total.item<double>());
    if (group.rank() == 0 && step % 10 == 0) std::cout << "step " << step << " loss " << total.item<double>() << "\n";
  }
  manager.wait();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) {
    std::cerr << "usage: two_dimensions DIRECTORY STEPS TENSOR_PARALLEL_RANKS\n";
    return 2;
  }
  try {
    train(argv[1], std::atoll(argv[2]), std::atoi(argv[3]));
  } catch (const Error& error) {
    std::cerr << "two_dimensions: " << error.what() << "\n";
    return 3;
  }
}
