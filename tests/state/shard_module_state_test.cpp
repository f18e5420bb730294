// The states of a model whose parameters shard_module sharded, and of its optimizer, are saved and loaded as full ones.

#include <ATen/ops/full.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/optim/adam.h>

#include "support/temporary_directory.h"
#include "tensor/sharding_support.h"
#include "tessera/comm/local_ranks.h"
#include "tessera/state/load.h"
#include "tessera/state/module_state.h"
#include "tessera/state/optimizer_state.h"
#include "tessera/state/save.h"
#include "tessera/tensor/shard_module.h"

namespace tessera {
namespace {

using testing::chunk_spec;
using testing::TemporaryDirectory;

struct ShardedNet : torch::nn::Module {
  explicit ShardedNet(double value) {
    words = register_module("words", ShardedEmbedding(7, 6));
    head = register_module("head", ShardedLinear(6, 5));
    const at::NoGradGuard no_grad;
    for (const at::Tensor& parameter : parameters()) {
      parameter.copy_(testing::indices(parameter.sizes().vec(), at::kFloat) / 50 + value);
    }
  }
  at::Tensor forward(const at::Tensor& ids) { return head(words(ids)); }
  ShardedEmbedding words{nullptr};
  ShardedLinear head{nullptr};
};

// A model and its optimizer after a step, on each rank with the same input.
struct ShardedTraining {
  explicit ShardedTraining(double value, const ShardingPlan& plan = {}, const ProcessGroup& group = {})
      : net(value), optimizer(net.parameters(), torch::optim::AdamOptions(0.1)) {
    shard_module(net, plan, group);
    (net.forward(at::tensor({0, 3, 6, 3})).square().sum() / group.size()).backward();
    optimizer.step();
  }
  StateDict state() const {
    return {{"model", get_model_state_dict(net)}, {"optimizer", get_optimizer_state_dict(net, optimizer)}};
  }
  void set(const StateDict& state) {
    set_model_state_dict(net, state.at("model").get<Dict>());
    set_optimizer_state_dict(net, optimizer, state.at("optimizer").get<Dict>());
  }
  ShardedNet net;
  torch::optim::Adam optimizer;
};

const ShardingPlan kOnThree = {{"words.weight", chunk_spec(0, {2, 0, 1})}, {"head.weight", chunk_spec(1, {0, 1, 2})}};
const ShardingPlan kOnTwo = {{"words.weight", chunk_spec(1, {0, 1})}, {"head.weight", chunk_spec(0, {1, 0})}};

TEST(ShardModuleStateTest, StatesAreSavedAndLoadedWithAnyShards) {
  const TemporaryDirectory directory, again;
  const ShardedTraining of_one(0.5);
  run_local(3, [&](const ProcessGroup& group) {
    const ShardedTraining training(0.5, kOnThree, group);
    save(training.state(), directory.path(), group);
  });
  run_local(2, [&](const ProcessGroup& group) {
    ShardedTraining training(0.1, kOnTwo, group);
    StateDict state = training.state();
    load(state, directory.path(), group);
    training.set(state);
    save(training.state(), again.path(), group);
  });
  const StateDict expected = load_full(directory.path()), found = load_full(again.path());
  EXPECT_TRUE(expected == found);
  const StateDict model = found.at("model").get<Dict>(), full = get_model_state_dict(of_one.net);
  ASSERT_EQ(model.size(), full.size());
  for (const auto& [name, value] : full) {
    EXPECT_TRUE(at::allclose(model.at(name).get<at::Tensor>(), value.get<at::Tensor>(), 1e-4, 1e-6)) << to_string(name);
  }
}

}  // namespace
}  // namespace tessera
