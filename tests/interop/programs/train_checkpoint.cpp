// Trains a small network with AdamW or SGD on two ranks as threads, half of the batch each, so that Python can resume
// it, and vice versa: train_checkpoint.py does the same.
//
//   train_checkpoint OPTIMIZER SOURCE|none DESTINATION FIRST LAST
//
// Loads SOURCE, unless there is none, trains steps FIRST to LAST, saves to DESTINATION, and prints the losses as a JSON
// list.

#include <fmt/format.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>
#include <torch/utils.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/comm/local_ranks.h"
#include "tessera/state/load.h"
#include "tessera/state/module_state.h"
#include "tessera/state/optimizer_state.h"
#include "tessera/state/save.h"

namespace {

using namespace tessera;

// Numbers that both languages make alike.
at::Tensor numbers(std::int64_t count, double step) {
  return (torch::arange(1, count + 1, torch::kDouble) * step).sin();
}

std::unique_ptr<torch::optim::Optimizer> make_optimizer(const std::string& name, torch::nn::Module& module) {
  if (name == "adamw") {
    return std::make_unique<torch::optim::AdamW>(module.parameters(),
                                                 torch::optim::AdamWOptions(0.02).weight_decay(0.1).amsgrad(true));
  }
  return std::make_unique<torch::optim::SGD>(module.parameters(),
                                             torch::optim::SGDOptions(0.05).momentum(0.9).nesterov(true));
}

std::vector<double> train(const ProcessGroup& group, const std::string& name, const std::string& source,
                          const std::string& destination, int first, int last) {
  torch::nn::Sequential network(torch::nn::Linear(4, 8), torch::nn::Tanh(), torch::nn::Linear(8, 1));
  network->to(torch::kDouble);
  {
    const torch::NoGradGuard no_grad;
    double step = 0.1;
    for (at::Tensor& parameter : network->parameters()) {
      parameter.copy_(numbers(parameter.numel(), step += 0.1).view_as(parameter) * 0.5);
    }
  }
  const auto optimizer = make_optimizer(name, *network);
  const auto state_now = [&] {
    return StateDict{{"model", get_model_state_dict(*network)},
                     {"optimizer", get_optimizer_state_dict(*network, *optimizer)}};
  };
  if (source != "none") {
    StateDict state = state_now();
    // An older PyTorch's optimizer has fewer options, and nothing else may be missing.
    LoadOptions options;
    options.rules.allow_partial = true;
    const LoadReport report = load(state, source, group, options);
    for (const std::string& missing : report.missing) {
      if (!missing.starts_with("optimizer.param_groups."))
        fail(ErrorCode::not_found, "{} has no '{}'", source, missing);
    }
    set_optimizer_state_dict(*network, *optimizer, state.at("optimizer").get<Dict>());
  }
  std::vector<double> losses;
  for (int step = first; step <= last; ++step) {
    const at::Tensor batch = numbers(32, 0.37 * step).view({8, 4});
    const at::Tensor mine = batch.narrow(0, 4 * group.rank(), 4);
    optimizer->zero_grad();
    const at::Tensor loss = (network->forward(mine) - mine.prod(1, true)).square().sum() / 8;
    loss.backward();
    at::Tensor total = loss.detach();
    group.all_reduce(total);
    for (const at::Tensor& parameter : network->parameters()) group.all_reduce(parameter.grad());
    optimizer->step();
    losses.push_back(total.item<double>());
  }
  save(state_now(), destination, group);
  return losses;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 6) {
    fmt::print(stderr, "usage: train_checkpoint adamw|sgd SOURCE|none DESTINATION FIRST LAST\n");
    return 2;
  }
  try {
    run_local(2, [&](const ProcessGroup& group) {
      const std::vector<double> losses =
          train(group, argv[1], argv[2], argv[3], std::atoi(argv[4]), std::atoi(argv[5]));
      if (group.rank() != 0) return;
      std::string text;
      for (const double loss : losses) text += fmt::format("{}{}", text.empty() ? "" : ", ", loss);
      fmt::print("[{}]\n", text);
    });
  } catch (const std::exception& error) {
    fmt::print(stderr, "train_checkpoint: {}\n", error.what());
    return 3;
  }
  return 0;
}
