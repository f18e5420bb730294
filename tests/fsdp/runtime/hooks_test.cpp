// Functions of the program that replace the reduction of gradients, or follow it in backward.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/optim/adamw.h>

#include <memory>
#include <stdexcept>
#include <vector>

#include "fsdp/grads.h"
#include "fsdp/small_model.h"
#include "support/error_matchers.h"
#include "tessera/comm/local_ranks.h"
#include "tessera/fsdp/activation_checkpoint.h"

namespace tessera::fsdp {
namespace {

// Averages over the ranks in `dtype`.
CommHook average_in(at::ScalarType dtype, int& calls) {
  return [dtype, &calls](const at::Tensor& gradient, const at::Tensor& shard, const ProcessGroup& group) {
    ++calls;
    const at::Tensor in = gradient.to(dtype).div_(group.size());
    const at::Tensor out = gradient.is_same(shard) ? in : at::empty_like(shard, shard.options().dtype(dtype));
    const auto pending = std::make_shared<PendingCollective>(
        gradient.is_same(shard) ? group.start_all_reduce(in) : group.start_reduce_scatter_into(out, in));
    return [=] {
      pending->wait();
      shard.copy_(out);
    };
  };
}

TEST(CommHookTest, ItReplacesTheReduction) {
  SmallModel alone = make_model();
  backward_of_all(alone, {0}, 3);
  run_local(3, [&](const ProcessGroup& group) {
    for (const Options& way : kWays) {
      FullyShardedDataParallel<SmallModel> model(make_model(), group, way);
      int calls = 0;
      model.register_comm_hook(average_in(at::kDouble, calls));
      {
        const auto no_sync = model.no_sync();
        loss_of(model(batch_of(0, group.rank()))).backward();
      }
      EXPECT_EQ(calls, 0);
      model.zero_grad();
      loss_of(model(batch_of(0, group.rank()))).backward();
      EXPECT_EQ(calls, static_cast<int>(model.unit_count()) - 1);  // but not of the unit that is not called
      expect_same_grads(unsharded_grads(model), *alone);
    }
  });
}

TEST(CommHookTest, CompressedGradientsAreThoseOfAReductionInThatDtype) {
  run_local(4, [&](const ProcessGroup& group) {
    for (const at::ScalarType dtype : {at::kHalf, at::kBFloat16}) {
      for (const ShardingStrategy strategy : {ShardingStrategy::full_shard, ShardingStrategy::no_shard}) {
        Options options;
        options.strategy = strategy;
        FullyShardedDataParallel<SmallModel> by_hook(make_model(at::kFloat), group, options);
        int calls = 0;
        by_hook.register_comm_hook(average_in(dtype, calls));
        options.mixed_precision.reduce_dtype = dtype;
        FullyShardedDataParallel<SmallModel> by_dtype(make_model(at::kFloat), group, options);
        for (auto* model : {&by_hook, &by_dtype}) {
          loss_of((*model)(batch_of(0, group.rank(), at::kFloat))).backward();
        }
        const std::vector<at::Tensor> one = unsharded_grads(by_hook), other = unsharded_grads(by_dtype);
        for (std::size_t i = 0; i < one.size(); ++i) {
          ASSERT_EQ(one[i].defined(), other[i].defined());
          if (!one[i].defined()) continue;
          EXPECT_EQ(one[i].scalar_type(), at::kFloat);
          EXPECT_TRUE(at::allclose(one[i], other[i], 2e-2, 1e-3)) << i;
        }
      }
    }
  });
}

TEST(CommHookTest, WhatCannotBeRegistered) {
  run_local(2, [&](const ProcessGroup& group) {
    FullyShardedDataParallel<SmallModel> model(make_model(), group);
    int calls = 0;
    EXPECT_ERROR(model.register_comm_hook(group.rank() == 0 ? CommHook() : average_in(at::kDouble, calls)),
                 ErrorCode::invalid_argument, "the hook is null");
    model.register_comm_hook(average_in(at::kDouble, calls));
    EXPECT_ERROR(model.register_comm_hook(average_in(at::kDouble, calls)), ErrorCode::invalid_argument,
                 "expected one registration");
    const HybridGroups groups = hybrid_groups(group, 1);
    Options options;
    options.strategy = ShardingStrategy::hybrid_shard;
    options.replicas = groups.replicas;
    FullyShardedDataParallel<SmallModel> hybrid(make_model(), groups.shards, options);
    EXPECT_ERROR(hybrid.register_comm_hook(average_in(at::kDouble, calls)), ErrorCode::unsupported,
                 "the strategy is hybrid");
  });
}

class PostReduceHookTest : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Worlds, PostReduceHookTest, ::testing::Values(1, 3));

TEST_P(PostReduceHookTest, AnOptimizerStepsInBackward) {
  run_local(GetParam(), [&](const ProcessGroup& group) {
    for (const Options& way : kWays) {
      FullyShardedDataParallel<SmallModel> model(make_model(), group, way), expected(make_model(), group, way);
      const auto adamw = [](const std::vector<at::Tensor>& params) {
        return std::make_unique<torch::optim::AdamW>(params, torch::optim::AdamWOptions(0.02));
      };
      std::vector<std::unique_ptr<torch::optim::AdamW>> optimizers;
      for (std::size_t i = 0; i < model.unit_count(); ++i) {
        optimizers.push_back(adamw(way.use_orig_params ? model.handle(i).params()
                                                       : std::vector<at::Tensor>{model.handle(i).flat_param()}));
      }
      const auto optimizer = adamw(expected.parameters());
      std::vector<int> steps(model.unit_count());
      model.register_post_reduce_hook([&](std::size_t unit) {
        ++steps[unit];
        optimizers[unit]->step();
        optimizers[unit]->zero_grad();
      });
      for (int step = 0; step < 3; ++step) {
        for (auto* each : {&model, &expected}) {  // two calls of forward, one backward
          (loss_of((*each)(batch_of(step, group.rank()))) + loss_of((*each)(batch_of(step + 5, group.rank()))))
              .backward();
        }
        optimizer->step();
        expected.zero_grad();
        for (const at::Tensor& param : model.parameters()) {
          EXPECT_TRUE(!param.grad().defined() || param.grad().abs().sum().item<double>() == 0);
        }
      }
      const std::vector<at::Tensor> found = full_params(model), wanted = full_params(expected);
      for (std::size_t i = 0; i < found.size(); ++i) EXPECT_TRUE(at::allclose(found[i], wanted[i], 1e-12)) << i;
      for (std::size_t i = 0; i < steps.size(); ++i) EXPECT_EQ(steps[i], model.unit_name(i) == "never" ? 0 : 3);
    }
  });
}

TEST(PostReduceHookFailureTest, AfterABackwardThatThrewItIsNotCalled) {
  FullyShardedDataParallel<SmallModel> model(make_model());
  int calls = 0;
  bool throws = true;
  model.register_post_reduce_hook([&](std::size_t) {
    ++calls;
    if (throws) throw std::runtime_error("no step");
  });
  EXPECT_THROW(loss_of(model(batch_of(0, 0))).backward(), std::runtime_error);
  EXPECT_EQ(calls, 1);
  throws = false;
  model.zero_grad();
  const at::Tensor loss = loss_of(model(batch_of(0, 0)));
  EXPECT_EQ(calls, 1);
  loss.backward();
  EXPECT_EQ(calls, static_cast<int>(model.unit_count()));
}

// A unit whose calls are checkpointed, called before and after another unit.
struct TwoViewsImpl : torch::nn::Module {
  TwoViewsImpl() {
    tower = register_module("tower", Checkpointed<Wrap<Block>>(5));
    between = register_module("between", Wrap<Block>(5));
  }
  at::Tensor forward(const at::Tensor& x) { return tower->forward(between(tower->forward(x))); }
  Checkpointed<Wrap<Block>> tower{nullptr};
  Wrap<Block> between{nullptr};
};
TORCH_MODULE(TwoViews);

TEST_P(PostReduceHookTest, AnOptimizerStepsOnceWhereCheckpointedCallsAreRepeated) {
  const auto make = [] {
    TwoViews model;
    fill(*model);
    return model;
  };
  run_local(GetParam(), [&](const ProcessGroup& group) {
    for (const Options& way : kWays) {
      for (const bool repeats_all : {false, true}) {
        FullyShardedDataParallel<TwoViews> model(make(), group, way), expected(make(), group, way);
        std::vector<std::unique_ptr<torch::optim::AdamW>> optimizers;
        for (std::size_t i = 0; i < model.unit_count(); ++i) {
          optimizers.push_back(std::make_unique<torch::optim::AdamW>(
              way.use_orig_params ? model.handle(i).params() : std::vector<at::Tensor>{model.handle(i).flat_param()},
              torch::optim::AdamWOptions(0.02)));
        }
        torch::optim::AdamW optimizer(expected.parameters(), torch::optim::AdamWOptions(0.02));
        std::vector<int> steps(model.unit_count());
        model.register_post_reduce_hook([&](std::size_t unit) {
          ++steps[unit];
          optimizers[unit]->step();
          optimizers[unit]->zero_grad();
        });
        for (int step = 0; step < 2; ++step) {
          for (auto* each : {&model, &expected}) {
            const auto call = [&](int batch) {
              const auto plain = [each](const at::Tensor& x) { return (*each)(x); };
              const at::Tensor x = batch_of(batch, group.rank());
              return loss_of(repeats_all ? activation_checkpoint(plain, x) : plain(x));
            };
            (call(step) + call(step + 5)).backward();
          }
          optimizer.step();
          expected.zero_grad();
          for (const int count : steps) EXPECT_EQ(count, step + 1);
        }
        const std::vector<at::Tensor> found = full_params(model), wanted = full_params(expected);
        for (std::size_t i = 0; i < found.size(); ++i) EXPECT_TRUE(at::allclose(found[i], wanted[i], 1e-12)) << i;
      }
    }
  });
}

TEST(PostReduceHookOrderTest, ItFollowsTheLastCallOfAUnitInEachOfTwoBackwards) {
  SmallModel plain = make_model();
  plain->twice->up->bias.set_requires_grad(false);
  FullyShardedDataParallel<SmallModel> model(plain);
  std::vector<int> calls(model.unit_count());
  const at::Tensor one = loss_of(model(batch_of(0, 0))), two = loss_of(model(batch_of(1, 0)));
  model.register_post_reduce_hook([&](std::size_t unit) { ++calls[unit]; });
  for (const at::Tensor& loss : {one, two}) {
    calls.assign(calls.size(), 0);
    loss.backward();
    for (std::size_t i = 0; i < calls.size(); ++i) {
      EXPECT_EQ(calls[i], model.unit_name(i) == "never" ? 0 : 1) << model.unit_name(i);
    }
  }
}

}  // namespace
}  // namespace tessera::fsdp
