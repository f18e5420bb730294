// Functions of the program that replace the reduction of gradients, or follow it in backward.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/optim/adamw.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
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

// Checkpoints its units, so that their hooks are called at the end of backward.
struct CheckpointedPairImpl : torch::nn::Module {
  CheckpointedPairImpl() {
    scale = register_parameter("scale", at::ones({5}));
    first = register_module("first", Checkpointed<Wrap<Block>>(5));
    second = register_module("second", Checkpointed<Wrap<Block>>(5));
    fill(*this);
  }
  at::Tensor forward(const at::Tensor& x) { return second->forward(first->forward(x * scale)) * scale; }
  at::Tensor scale;
  Checkpointed<Wrap<Block>> first{nullptr}, second{nullptr};
};
TORCH_MODULE(CheckpointedPair);

TEST_P(PostReduceHookTest, ItMayCallTheModel) {
  run_local(GetParam(), [&](const ProcessGroup& group) {
    for (const Options& way : kWays) {
      FullyShardedDataParallel<CheckpointedPair> model(CheckpointedPair(), group, way),
          expected(CheckpointedPair(), group, way);
      torch::optim::AdamW optimizer(model.parameters(), torch::optim::AdamWOptions(0.02)),
          other(expected.parameters(), torch::optim::AdamWOptions(0.02));
      int calls = 0;
      model.register_post_reduce_hook([&](std::size_t unit) {
        if (unit + 1 != model.unit_count()) return;
        ++calls;
        const at::NoGradGuard no_grad;
        model(batch_of(3, group.rank()));
      });
      for (int step = 0; step < 2; ++step) {
        for (auto* each : {&model, &expected}) {
          each->zero_grad();
          loss_of((*each)(batch_of(step, group.rank()))).backward();
        }
        for (std::size_t i = 0; i < model.unit_count(); ++i) {
          EXPECT_FALSE(model.handle(i).is_unsharded()) << model.unit_name(i);
        }
        optimizer.step();
        other.step();
      }
      EXPECT_EQ(calls, 2);
      const std::vector<at::Tensor> found = full_params(model), wanted = full_params(expected);
      for (std::size_t i = 0; i < found.size(); ++i) EXPECT_TRUE(at::allclose(found[i], wanted[i], 1e-12)) << i;
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

TEST(PostReduceHookFailureTest, ItStaysRegisteredIfReductionsFailToo) {
  run_local(2, [](const ProcessGroup& group) {
    FullyShardedDataParallel<SmallModel> model(make_model(), group);
    bool fails = true;
    model.register_comm_hook([&](const at::Tensor& gradient, const at::Tensor& shard, const ProcessGroup& ranks) {
      const auto pending = std::make_shared<PendingCollective>(ranks.start_reduce_scatter_into(shard, gradient));
      return [&fails, pending] {
        pending->wait();
        if (fails) throw std::runtime_error("no reduction");
      };
    });
    std::vector<int> calls(model.unit_count());
    model.register_post_reduce_hook([&](std::size_t unit) { ++calls[unit]; });
    EXPECT_THROW(loss_of(model(batch_of(0, 0))).backward(), std::runtime_error);
    const at::Tensor loss = loss_of(model(batch_of(0, 0)));
    fails = false;
    loss.backward();
    for (std::size_t i = 0; i < calls.size(); ++i) EXPECT_EQ(calls[i], model.unit_name(i) == "never" ? 0 : 1) << i;
  });
}

// Calls one of two units.
struct OneOrOtherImpl : torch::nn::Module {
  OneOrOtherImpl() {
    one = register_module("one", Wrap<Block>(5));
    other = register_module("other", Wrap<Block>(5));
  }
  at::Tensor forward(const at::Tensor& x, bool calls_other) { return calls_other ? other(x) : one(x); }
  Wrap<Block> one{nullptr}, other{nullptr};
};
TORCH_MODULE(OneOrOther);

TEST(PostReduceHookOrderTest, ReductionsBeforeItWasRegisteredDoNotCount) {
  OneOrOther plain;
  fill(*plain);
  FullyShardedDataParallel<OneOrOther> model(plain);
  const auto call = [&](const at::Tensor& x) { return model(x, /*calls_other=*/false); };
  loss_of(activation_checkpoint(call, batch_of(0, 0))).backward();
  std::vector<std::string> calls;
  model.register_post_reduce_hook([&](std::size_t unit) { calls.push_back(model.unit_name(unit)); });
  loss_of(model(batch_of(0, 0), /*calls_other=*/true)).backward();
  EXPECT_THAT(calls, ::testing::ElementsAre("other"));
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

// The same unit twice in a row.
struct TwiceInARowImpl : torch::nn::Module {
  TwiceInARowImpl() { layer = register_module("layer", Wrap<Checkpointed<Block>>(5)); }
  at::Tensor forward(const at::Tensor& x) { return layer->forward(layer->forward(x)); }
  Wrap<Checkpointed<Block>> layer{nullptr};
};
TORCH_MODULE(TwiceInARow);

// Compares an optimizer that steps in the hook with one that steps after backward. In a backward there are two calls of
// the model, each of which may be checkpointed.
template <typename Model>
void expect_the_same_steps(const ProcessGroup& group, const Options& way) {
  const auto make = [] {
    Model model;
    fill(*model);
    return model;
  };
  const std::vector<std::pair<bool, bool>> checkpointed{{false, false}, {true, true}, {true, false}, {false, true}};
  FullyShardedDataParallel<Model> model(make(), group, way), expected(make(), group, way);
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
  for (std::size_t step = 0; step < checkpointed.size(); ++step) {
    for (auto* each : {&model, &expected}) {
      const auto call = [&](int batch, bool repeats) {
        const auto plain = [each](const at::Tensor& x) { return (*each)(x); };
        const at::Tensor x = batch_of(batch, group.rank());
        return loss_of(repeats ? activation_checkpoint(plain, x) : plain(x));
      };
      const auto [repeats_first, repeats_second] = checkpointed[step];
      const at::Tensor first = call(static_cast<int>(step), repeats_first);
      const at::Tensor second = call(static_cast<int>(step) + 5, repeats_second);
      (first + second).backward();
    }
    optimizer.step();
    expected.zero_grad();
    for (const int count : steps) EXPECT_EQ(count, static_cast<int>(step) + 1);
  }
  const std::vector<at::Tensor> found = full_params(model), wanted = full_params(expected);
  for (std::size_t i = 0; i < found.size(); ++i) EXPECT_TRUE(at::allclose(found[i], wanted[i], 1e-12)) << i;
}

TEST_P(PostReduceHookTest, AnOptimizerStepsOnceWhereCheckpointedCallsAreRepeated) {
  run_local(GetParam(), [&](const ProcessGroup& group) {
    for (const Options& way : kWays) {
      expect_the_same_steps<TwoViews>(group, way);
      expect_the_same_steps<TwiceInARow>(group, way);
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
