// Units that are gathered ahead of their calls: by hand, and kept after a backward that does not reduce.

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/optim/sgd.h>

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "fsdp/grads.h"
#include "fsdp/small_model.h"
#include "support/error_matchers.h"
#include "tessera/comm/comm_debug_mode.h"
#include "tessera/comm/local_ranks.h"
#include "tessera/fsdp/activation_checkpoint.h"
#include "tessera/tensor/optim/fused_optimizers.h"

namespace tessera::fsdp {
namespace {

using Model = FullyShardedDataParallel<SmallModel>;

std::int64_t gathers_of(const CommDebugMode& mode) {
  const auto counts = mode.counts();
  const auto found = counts.find("all_gather_into");
  return found == counts.end() ? 0 : found->second;
}

TEST(UnshardTest, WhatIsGatheredBeforeForwardIsNotGatheredInIt) {
  SmallModel alone = make_model();
  backward_of_all(alone, {1}, 2);
  run_local(2, [&](const ProcessGroup& group) {
    for (const Options& way : kWays) {
      Model model(make_model(), group, way);
      loss_of(model(batch_of(0, group.rank()))).backward();  // the ranks compare their calls
      model.zero_grad();
      model.unshard().wait();
      EXPECT_EQ(model->inner->weight.dim(), is_sharded(way.strategy) ? 1 : 2);
      const CommDebugMode mode(group);
      const at::Tensor loss = loss_of(model(batch_of(1, group.rank())));
      // Except for the second call of 'twice', which was freed after the first.
      EXPECT_EQ(gathers_of(mode), way.strategy == ShardingStrategy::full_shard ? 1 : 0);
      EXPECT_EQ(mode.comparisons(), 0);
      loss.backward();
      expect_same_grads(unsharded_grads(model), *alone);
    }
  });
}

TEST(UnshardTest, OnlyTheUnitsOfAModuleAreGathered) {
  run_local(2, [&](const ProcessGroup& group) {
    Model model(make_model(), group);
    UnshardHandle handle = model.unshard(model->first.get());
    for (std::size_t i = 0; i < model.unit_count(); ++i) {
      EXPECT_EQ(model.handle(i).is_gathered(), model.unit_name(i) == "first") << model.unit_name(i);
    }
    handle.wait();
    handle.wait();
    model.unshard(nullptr, /*recurse=*/false);
    EXPECT_TRUE(model.handle(0).is_gathered());
    EXPECT_FALSE(model.handle(2).is_gathered());
    model.reshard();
    for (std::size_t i = 0; i < model.unit_count(); ++i) EXPECT_FALSE(model.handle(i).is_gathered());
  });
}

TEST(UnshardTest, AChangeAfterItIsRefusedUntilItIsGatheredAgain) {
  run_local(2, [&](const ProcessGroup& group) {
    Model model(make_model(), group);
    const auto train = [&] { loss_of(model(batch_of(0, group.rank()))).backward(); };
    const auto change = [&] {
      const at::NoGradGuard no_grad;
      for (const at::Tensor& param : model.parameters()) param.mul_(0.5);
    };
    train();
    model.unshard().wait();
    change();
    EXPECT_ERROR(train(), ErrorCode::invalid_argument, "the model itself were changed while they were gathered");
    train();  // the model stays usable
    model.unshard();
    change();
    model.unshard();
    train();
    model.unshard();
    change();
    model.reshard();
    train();
    SmallModel expected = make_model();
    const std::vector<at::Tensor> params = expected->parameters(), found = full_params(model);
    for (std::size_t i = 0; i < params.size(); ++i) EXPECT_TRUE(at::allclose(found[i], params[i] * 0.125)) << i;
  });
}

TEST(UnshardTest, AStepOfAFusedOptimizerIsAChange) {
  run_local(2, [&](const ProcessGroup& group) {
    Model model(make_model(), group);
    FusedAdamW optimizer(model.parameters());
    const auto train = [&] { loss_of(model(batch_of(0, group.rank()))).backward(); };
    train();
    model.unshard().wait();
    optimizer.step();
    EXPECT_ERROR(train(), ErrorCode::invalid_argument, "the model itself were changed while they were gathered");
    train();
  });
}

// Starts to gather its second unit before the first computes.
struct AheadImpl : torch::nn::Module {
  AheadImpl() {
    first = register_module("first", Wrap<torch::nn::Linear>(5, 4));
    second = register_module("second", Wrap<torch::nn::Linear>(4, 3));
  }
  at::Tensor forward(const at::Tensor& x) {
    if (unshards) second->unshard();
    if (seen) seen();
    return second(at::tanh(first(x)));
  }
  Wrap<torch::nn::Linear> first{nullptr}, second{nullptr};
  bool unshards = true;
  std::function<void()> seen;
};
TORCH_MODULE(Ahead);

Ahead make_ahead() {
  Ahead model;
  fill(*model);
  return model;
}

Options without_prefetch() {
  Options options;
  options.forward_prefetch = false;
  options.backward_prefetch = BackwardPrefetch::none;
  return options;
}

TEST(UnshardTest, AForwardGathersAUnitBeforeItCallsIt) {
  Ahead alone = make_ahead();  // not sharded: unshard has no effect
  backward_of_all(alone, {0}, 2);
  run_local(2, [&](const ProcessGroup& group) {
    FullyShardedDataParallel<Ahead> model(make_ahead(), group, without_prefetch());
    int times = 0;
    model->seen = [&] {
      ++times;
      EXPECT_FALSE(model.handle(0).is_gathered());
      EXPECT_TRUE(model.handle(1).is_gathered());
    };
    for (int step = 0; step < 3; ++step) {
      model.zero_grad();
      loss_of(model(batch_of(0, group.rank()))).backward();
      expect_same_grads(unsharded_grads(model), *alone);
    }
    EXPECT_EQ(times, 3);
  });
}

TEST(UnshardTest, ARepeatedForwardGathersAsItsBackwardDoes) {
  Ahead alone = make_ahead();
  backward_of_all(alone, {0}, 2);
  struct RepeatingImpl : torch::nn::Module {
    RepeatingImpl() { inner = register_module("inner", make_ahead()); }
    at::Tensor forward(const at::Tensor& x) {
      return activation_checkpoint([this](const at::Tensor& y) { return inner(y); }, x);
    }
    Ahead inner{nullptr};
  };
  run_local(2, [&](const ProcessGroup& group) {
    FullyShardedDataParallel<RepeatingImpl> model(std::make_shared<RepeatingImpl>(), group);
    const at::Tensor loss = loss_of(model(batch_of(0, group.rank()).set_requires_grad(true)));
    const CommDebugMode mode(group);
    loss.backward();
    EXPECT_EQ(mode.comparisons(), 0);
    expect_same_grads(unsharded_grads(model), *alone);
  });
}

TEST(UnshardTest, ARankThatUnshardsAloneIsNamed) {
  run_local(3, [&](const ProcessGroup& group) {
    FullyShardedDataParallel<Ahead> model(make_ahead(), group);
    model->unshards = group.rank() == 1;
    EXPECT_ERROR(model(batch_of(0, 0)), ErrorCode::invalid_argument, "rank 1 unshards 'second', rank 0 calls 'first'");
  });
  run_local(3, [&](const ProcessGroup& group) {
    FullyShardedDataParallel<Ahead> model(make_ahead(), group);
    loss_of(model(batch_of(0, 0))).backward();
    model->unshards = group.rank() != 1;
    EXPECT_ERROR(
        loss_of(model(batch_of(0, 0))).backward(), ErrorCode::rank_failure,
        "rank 1 left the order of the previous forward: at call 2 of a unit it reached 'first', expected unshard "
        "of 'second' as before");
  });
}

TEST(UnshardTest, Misuse) {
  run_local(2, [&](const ProcessGroup& group) {
    FullyShardedDataParallel<Ahead> model(make_ahead(), group);
    const Ahead other = make_ahead();
    EXPECT_ERROR(model.unshard(group.rank() == 1 ? other.get() : model.module().get()), ErrorCode::invalid_argument,
                 "unshard", "rank 1", "is not in the model");
    EXPECT_ERROR(model.unshard(group.rank() == 1 ? model->first.get() : model->second.get()),
                 ErrorCode::invalid_argument, "unshard", "expected the same on all ranks");
    EXPECT_ERROR(model.reshard(other.get()), ErrorCode::invalid_argument, "is not in the model");
    model->seen = [&] {
      EXPECT_ERROR(model.reshard(), ErrorCode::invalid_argument, "reshard: called in forward of the model");
      EXPECT_ERROR(model.no_sync(), ErrorCode::invalid_argument, "no_sync: called in forward of the model");
    };
    const at::Tensor loss = loss_of(model(batch_of(0, group.rank())));
    loss.register_hook([&](const at::Tensor&) {});
    model->seen = nullptr;
    loss.backward();
    UnshardHandle late;
    {
      FullyShardedDataParallel<Ahead> gone(make_ahead(), group);
      late = gone.unshard();
      late.wait();
      late = gone.unshard(gone->first.get());
      gone.reshard();
    }
    late.wait();
  });
}

// --- backward without reduction

TEST(NoSyncTest, UnitsThatStayGatheredAfterForwardStayGatheredAfterBackward) {
  SmallModel alone = make_model();
  backward_of_all(alone, {0, 1, 2}, 2);
  run_local(2, [&](const ProcessGroup& group) {
    for (const bool use_orig_params : {true, false}) {
      for (const auto strategy : {ShardingStrategy::shard_grad_op, ShardingStrategy::full_shard}) {
        Model model(make_model(), group, options_of(strategy, use_orig_params));
        std::vector<std::int64_t> gathers;
        for (int step = 0; step < 3; ++step) {
          const auto guard = model.no_sync(/*off=*/step == 2);
          const CommDebugMode mode(group);
          const at::Tensor loss = loss_of(model(batch_of(step, group.rank())));
          const auto first = step == 0 ? std::int64_t{0} : gathers_of(mode);
          loss.backward();
          gathers.push_back(gathers_of(mode));
          if (step == 1 && strategy == ShardingStrategy::shard_grad_op) {
            EXPECT_EQ(first, 0);
          }
        }
        const bool keeps = strategy == ShardingStrategy::shard_grad_op;
        EXPECT_EQ(gathers[1] == 0 && gathers[2] == 0, keeps);
        for (std::size_t i = 0; i < model.unit_count(); ++i) EXPECT_FALSE(model.handle(i).is_gathered());
        expect_same_grads(unsharded_grads(model), *alone);
      }
    }
  });
}

TEST(NoSyncTest, AnOptimizerThatStepsAllTheSameIsNoticed) {
  run_local(2, [&](const ProcessGroup& group) {
    Model model(make_model(), group, options_of(ShardingStrategy::shard_grad_op, true));
    const auto train = [&] { loss_of(model(batch_of(0, group.rank()))).backward(); };
    const auto change = [&] {
      const at::NoGradGuard no_grad;
      for (const at::Tensor& param : model.parameters()) param.mul_(0.5);
    };
    {
      const auto guard = model.no_sync();
      train();
      change();
    }
    EXPECT_ERROR(train(), ErrorCode::invalid_argument, "were changed while they were gathered");
    {
      const auto guard = model.no_sync();
      train();
    }
    model.load_state_dict(model.state_dict());  // the same values
    train();
    {
      const auto guard = model.no_sync();
      train();
    }
    change();
    model.reshard();
    train();
  });
}

TEST(NoSyncTest, AnEvaluationInBetweenChangesNothing) {
  SmallModel alone = make_model();
  backward_of_all(alone, {0, 1}, 2);
  run_local(2, [&](const ProcessGroup& group) {
    Model model(make_model(), group, options_of(ShardingStrategy::shard_grad_op, true));
    {
      const auto guard = model.no_sync();
      loss_of(model(batch_of(0, group.rank()))).backward();
      const at::NoGradGuard no_grad;
      model(batch_of(3, group.rank()));
      model.summon_full_params([] {});
    }
    loss_of(model(batch_of(1, group.rank()))).backward();
    expect_same_grads(unsharded_grads(model), *alone);
  });
}

}  // namespace
}  // namespace tessera::fsdp
