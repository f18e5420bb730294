// Trains a small network with AdamW on all ranks and saves in the background every few steps. When started again, on
// any number of ranks, resumes from the last checkpoint.
//
//   tessera run -n 2 -- build/bin/train checkpoints 40
//   tessera run -n 4 -- build/bin/train checkpoints 80      resumes from step 40

#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>
#include <torch/utils.h>

#include <cstdlib>
#include <iostream>

#include "tessera/comm/init.h"
#include "tessera/state/checkpoint_manager.h"
#include "tessera/state/module_state.h"
#include "tessera/state/optimizer_state.h"

namespace {

struct Network : torch::nn::Module {
  Network() {
    first = register_module("first", torch::nn::Linear(4, 32));
    second = register_module("second", torch::nn::Linear(32, 1));
  }
  at::Tensor forward(const at::Tensor& x) { return second(torch::tanh(first(x))); }
  torch::nn::Linear first{nullptr}, second{nullptr};
};

constexpr std::int64_t kBatch = 48;  // of all ranks together, so the result does not depend on their number

// Returns the batch of a step; each rank trains on its rows.
at::Tensor batch_of(std::int64_t step) {
  torch::manual_seed(static_cast<std::uint64_t>(step) + 1);
  return torch::rand({kBatch, 4}, torch::kDouble).mul_(2).sub_(1);
}

}  // namespace

int main(int argc, char** argv) {
  using namespace tessera;
  if (argc != 3) {
    std::cerr << "usage: train DIRECTORY STEPS\n";
    return 2;
  }
  const ProcessGroup group = init_process_group();
  torch::manual_seed(0);
  Network network;
  network.to(torch::kDouble);
  torch::optim::AdamW optimizer(network.parameters(), torch::optim::AdamWOptions(0.02));

  CheckpointManagerOptions options;
  options.save_every = 10;
  options.keep_last = 2;
  options.warn = [](const std::string& what) { std::cerr << "warning: " << what << "\n"; };
  CheckpointManager manager(argv[1], group, options);
  const auto state_now = [&] {
    return StateDict{{"model", get_model_state_dict(network)},
                     {"optimizer", get_optimizer_state_dict(network, optimizer)}};
  };
  StateDict state = state_now();
  const auto restored = manager.restore_latest(state);
  if (restored) set_optimizer_state_dict(network, optimizer, state.at("optimizer").get<Dict>());
  if (restored && group.rank() == 0) std::cout << "resumed from step " << *restored << "\n";

  for (std::int64_t step = restored.value_or(0) + 1; step <= std::atoll(argv[2]); ++step) {
    const at::Tensor batch = batch_of(step);
    const at::Tensor mine = batch.slice(0, group.rank(), kBatch, group.size());
    const at::Tensor wanted = mine.prod(1, true).add(mine.sum(1, true));
    optimizer.zero_grad();
    const at::Tensor loss = (network.forward(mine) - wanted).square().sum() / kBatch;
    loss.backward();
    at::Tensor total = loss.detach();
    group.all_reduce(total);
    for (const at::Tensor& parameter : network.parameters()) group.all_reduce(parameter.grad());
    optimizer.step();
    manager.save(step, state_now(), total.item<double>());
    if (group.rank() == 0 && step % 10 == 0) std::cout << "step " << step << " loss " << total.item<double>() << "\n";
  }
  manager.wait();
}
