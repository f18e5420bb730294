// Optimizers of sharded models: parameter groups, several optimizers, parameters that are frozen at times.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/optim/adamw.h>

#include <memory>
#include <vector>

#include "fsdp/small_model.h"
#include "tessera/comm/local_ranks.h"
#include "tessera/state/optimizer_state.h"

namespace tessera::fsdp {
namespace {

// Two groups, of the parameters with two dimensions or more and of the others, where one process has them.
std::vector<torch::optim::OptimizerParamGroup> groups_of(const torch::nn::Module& module) {
  std::vector<at::Tensor> matrices, vectors;
  const SmallModel unsharded = make_model();
  const std::vector<at::Tensor> params = unique_params(module), shapes = unique_params(*unsharded);
  for (std::size_t i = 0; i < params.size(); ++i) (shapes[i].dim() > 1 ? matrices : vectors).push_back(params[i]);
  auto slow = std::make_unique<torch::optim::AdamWOptions>(0.01);
  slow->weight_decay(0.1);
  auto fast = std::make_unique<torch::optim::AdamWOptions>(0.05);
  fast->weight_decay(0);
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(std::move(matrices), std::move(slow));
  groups.emplace_back(std::move(vectors), std::move(fast));
  return groups;
}

void expect_equal_params(const std::vector<at::Tensor>& found, const torch::nn::Module& expected) {
  const std::vector<at::Tensor> params = expected.parameters();
  ASSERT_EQ(found.size(), params.size());
  for (std::size_t i = 0; i < found.size(); ++i) EXPECT_TRUE(at::allclose(found[i], params[i], 1e-9, 1e-11)) << i;
}

// The ways with parameters that groups can be made of.
std::vector<Options> ways_with_parameters() {
  return {options_of(ShardingStrategy::full_shard, true), options_of(ShardingStrategy::shard_grad_op, true),
          options_of(ShardingStrategy::no_shard, true)};
}

TEST(FsdpOptimizersTest, GroupsWithOptionsOfTheirOwn) {
  run_local(3, [](const ProcessGroup& group) {
    for (const Options& way : ways_with_parameters()) {
      SmallModel alone = make_model();
      FullyShardedDataParallel<SmallModel> model(make_model(), group, way);
      torch::optim::AdamW expected(groups_of(*alone)), optimizer(groups_of(*model.module()));
      for (int step = 0; step < 3; ++step) {
        backward_of_all(alone, {step}, 3);
        expected.step();
        model.zero_grad();
        loss_of(model(batch_of(step, group.rank()))).backward();
        optimizer.step();
      }
      expect_equal_params(full_params(model), *alone);

      // Into one process, as it is, and back.
      const StateDict full = model.optim_state_dict(optimizer, StateDictType::full, {.rank0_only = false});
      ASSERT_EQ(full.at("param_groups").get<List>().size(), 2u);
      SmallModel plain = make_model();
      torch::optim::AdamW of_plain(groups_of(*plain));
      set_model_state_dict(*plain, model.state_dict(StateDictType::full, {.rank0_only = false}));
      set_optimizer_state_dict(*plain, of_plain, full);
      FullyShardedDataParallel<SmallModel> again(make_model(), group, way);
      torch::optim::AdamW of_again(groups_of(*again.module()));
      again.load_state_dict(model.state_dict());
      again.load_optim_state_dict(of_again, full);
      backward_of_all(alone, {7}, 3);
      backward_of_all(plain, {7}, 3);
      expected.step();
      of_plain.step();
      again.zero_grad();
      loss_of(again(batch_of(7, group.rank()))).backward();
      of_again.step();
      expect_equal_params(plain->parameters(), *alone);
      expect_equal_params(full_params(again), *alone);
    }
  });
}

TEST(FsdpOptimizersTest, OneOptimizerForEachPart) {
  run_local(2, [](const ProcessGroup& group) {
    for (const Options& way : ways_with_parameters()) {
      SmallModel alone = make_model();
      FullyShardedDataParallel<SmallModel> model(make_model(), group, way);
      const auto parts_of = [](SmallModel& model_of) {
        std::vector<std::unique_ptr<torch::optim::AdamW>> parts;
        for (const auto& child : model_of->children()) {
          parts.push_back(std::make_unique<torch::optim::AdamW>(child->parameters(), torch::optim::AdamWOptions(0.02)));
        }
        return parts;
      };
      SmallModel sharded = model.module();
      const auto expected = parts_of(alone), optimizers = parts_of(sharded);
      for (int step = 0; step < 4; ++step) {
        backward_of_all(alone, {step}, 2);
        model.zero_grad();
        loss_of(model(batch_of(step, group.rank()))).backward();
        for (std::size_t i = 0; i < optimizers.size(); ++i) {
          if (step == 1 && i == 0) continue;  // each at its own pace
          expected[i]->step();
          optimizers[i]->step();
        }
      }
      expect_equal_params(full_params(model), *alone);
      for (const auto& optimizer : optimizers) {
        const StateDict state = model.optim_state_dict(*optimizer, StateDictType::full, {.rank0_only = false});
        model.load_optim_state_dict(*optimizer, state);
      }
    }
  });
}

TEST(FsdpOptimizersTest, ParametersThatAreFrozenAtTimes) {
  run_local(3, [](const ProcessGroup& group) {
    for (const Options& way : ways_with_parameters()) {
      SmallModel alone = make_model();
      FullyShardedDataParallel<SmallModel> model(make_model(), group, way);
      torch::optim::AdamW expected(unique_params(*alone), 0.02), optimizer(model.parameters(), 0.02);
      for (int step = 0; step < 4; ++step) {
        const bool is_frozen = step == 0 || step == 2;
        for (const SmallModel& each : {alone, model.module()}) {
          each->inner->weight.set_requires_grad(!is_frozen);
          for (const at::Tensor& param : each->first->parameters()) param.set_requires_grad(step != 1);
        }
        for (const at::Tensor& param : unique_params(*alone)) param.mutable_grad().reset();
        backward_of_all(alone, {step}, 3);
        expected.step();
        for (const at::Tensor& param : model.parameters()) param.mutable_grad().reset();
        loss_of(model(batch_of(step, group.rank()))).backward();
        optimizer.step();
        if (step == 0) {  // without a state of the parameters that were never updated
          const StateDict state = model.optim_state_dict(optimizer, StateDictType::full, {.rank0_only = false});
          EXPECT_FALSE(state.at("state").get<Dict>().contains("inner.weight"));
          EXPECT_TRUE(state.at("state").get<Dict>().contains("inner.bias"));
          model.load_optim_state_dict(optimizer, state);
        }
      }
      expect_equal_params(full_params(model), *alone);
    }
  });
}

}  // namespace
}  // namespace tessera::fsdp
