// Changes to a sharded model between its calls, and what a unit leaves alone.

#include <ATen/record_function.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <chrono>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "fsdp/grads.h"
#include "fsdp/small_model.h"
#include "support/error_matchers.h"
#include "support/rank_processes.h"
#include "tessera/base/function_ref.h"
#include "tessera/comm/local_ranks.h"

namespace tessera::fsdp {
namespace {

TEST(FsdpAssignedTest, DataAssignedAfterForwardIsThatOfBackwardOrRefused) {
  run_local(2, [](const ProcessGroup& group) {
    for (const auto strategy :
         {ShardingStrategy::full_shard, ShardingStrategy::shard_grad_op, ShardingStrategy::no_shard}) {
      FullyShardedDataParallel<SmallModel> model(make_model(), group, options_of(strategy, true));
      const at::Tensor loss = loss_of(model(batch_of(0, group.rank())));
      const at::Tensor& weight = model->inner->weight;
      const at::Tensor data = at::ones_like(weight.detach());
      weight.set_data(data);
      if (strategy != ShardingStrategy::full_shard) {
        EXPECT_ERROR(loss.backward(), ErrorCode::invalid_argument,
                     "data was assigned to parameters of 'inner' after forward");
        continue;
      }
      loss.backward();
      EXPECT_TRUE(at::equal(model->inner->weight.detach(), data));
      EXPECT_TRUE(at::equal(full_params(model)[static_cast<std::size_t>(0)], make_model()->parameters()[0]));
      model.summon_full_params([&] { EXPECT_EQ(model->inner->weight.sum().item<double>(), 35); });
    }
  });
}

TEST(FsdpAssignedTest, AGradientAssignedToAFlatParameterIsAddedTo) {
  run_local(2, [](const ProcessGroup& group) {
    FullyShardedDataParallel<SmallModel> model(make_model(), group, options_of(ShardingStrategy::full_shard, false));
    const auto backward = [&] { loss_of(model(batch_of(0, group.rank()))).backward(); };
    backward();
    const at::Tensor flat = model.parameters()[1], once = flat.grad().clone();
    flat.mutable_grad() = at::full_like(flat, 7.0).detach();
    backward();
    EXPECT_TRUE(at::allclose(flat.grad(), once + 7));
  });
}

TEST(FsdpAssignedTest, AConversionIsRefusedAlsoWithoutOriginalParameters) {
  run_local(2, [](const ProcessGroup& group) {
    FullyShardedDataParallel<torch::nn::LinearImpl> model(std::make_shared<torch::nn::LinearImpl>(4, 4), group,
                                                          options_of(ShardingStrategy::full_shard, false));
    model.module()->to(at::kDouble);
    EXPECT_ERROR(model(at::ones({2, 4})), ErrorCode::invalid_argument, "was converted to Double");
  });
}

TEST(FsdpTest, ParametersAreFrozenAndUnfrozenAtAnyTime) {
  const auto freeze = [](SmallModelImpl& model, bool frozen) {
    model.first->up->weight.set_requires_grad(!frozen);
    for (const at::Tensor& param : model.inner->parameters()) param.set_requires_grad(!frozen);
  };
  SmallModel unfrozen = make_model(), frozen = make_model();
  freeze(*frozen, true);
  backward_of_all(unfrozen, {0}, 2);
  backward_of_all(frozen, {0}, 2);
  run_local(2, [&](const ProcessGroup& group) {
    for (const auto strategy : {ShardingStrategy::full_shard, ShardingStrategy::no_shard}) {
      for (const bool frozen_first : {true, false}) {
        SmallModel plain = make_model();
        freeze(*plain, frozen_first);
        Options options;
        options.strategy = strategy;
        FullyShardedDataParallel<SmallModel> model(plain, group, options);
        bool is_frozen = frozen_first;
        for (int times = 0; times < 4; ++times) {
          model.zero_grad();
          loss_of(model(batch_of(0, group.rank()))).backward();
          expect_same_grads(unsharded_grads(model), is_frozen ? *frozen : *unfrozen);
          is_frozen = !is_frozen;
          freeze(*plain, is_frozen);
        }
      }
    }
  });
}

// What a program does between forward and backward, and then calls the model again, changes no gradient. Under mixed
// precision, what autograd saved in forward has param_dtype; full parameters have their own, in other memory.
void expect_same_gradients_after(FunctionRef<void(FullyShardedDataParallel<SmallModel>&)> between) {
  run_local(2, [&](const ProcessGroup& group) {
    for (const ShardingStrategy strategy :
         {ShardingStrategy::full_shard, ShardingStrategy::shard_grad_op, ShardingStrategy::no_shard}) {
      for (const bool low : {true, false}) {
        for (const bool use_orig_params : {true, false}) {
          Options options = options_of(strategy, use_orig_params);
          if (low) options.mixed_precision.param_dtype = at::kBFloat16;
          std::vector<at::Tensor> grads[2];
          for (const bool intervenes : {false, true}) {
            FullyShardedDataParallel<SmallModel> model(make_model(at::kFloat), group, options);
            const auto forward = [&](int step) { return loss_of(model(batch_of(step, group.rank(), at::kFloat))); };
            forward(1);
            if (intervenes) between(model);
            const at::Tensor loss = forward(0);
            if (intervenes) between(model);
            loss.backward();
            for (const at::Tensor& grad : unsharded_grads(model)) {
              grads[intervenes ? 1 : 0].push_back(grad.defined() ? grad : at::zeros({0}));
            }
          }
          ASSERT_EQ(grads[0].size(), grads[1].size());
          for (std::size_t i = 0; i < grads[0].size(); ++i) EXPECT_TRUE(at::equal(grads[0][i], grads[1][i])) << i;
        }
      }
    }
  });
}

TEST(FsdpTest, SummonAfterForward) {
  expect_same_gradients_after([](ShardedModule& model) { model.summon_full_params([] {}, {.writeback = false}); });
  expect_same_gradients_after([](ShardedModule& model) { model.summon_full_params([] {}); });
}

std::vector<bool> gathered_units(const ShardedModule& model) {
  std::vector<bool> gathered;
  for (std::size_t i = 0; i < model.unit_count(); ++i) gathered.push_back(model.handle(i).is_gathered());
  return gathered;
}

// PyTorch: test_unshard_params_respects_reshard.
TEST(FsdpTest, WhatForwardLeavesGatheredStaysInASummonThatChangesNothing) {
  run_local(2, [](const ProcessGroup& group) {
    for (const bool lowers_precision : {false, true}) {
      for (const auto strategy : {ShardingStrategy::full_shard, ShardingStrategy::shard_grad_op}) {
        Options options = options_of(strategy, true);
        if (lowers_precision) options.mixed_precision.param_dtype = options.mixed_precision.reduce_dtype = at::kFloat;
        FullyShardedDataParallel<SmallModel> model(make_model(), group, options);
        const auto forward = [&] { return loss_of(model(batch_of(0, group.rank()))); };
        forward().backward();
        const std::vector<at::Tensor> expected = unsharded_grads(model);
        for (const SummonOptions& way :
             {SummonOptions{}, SummonOptions{.writeback = false}, SummonOptions{.writeback = false, .rank0_only = true},
              SummonOptions{.with_grads = true}}) {
          model.zero_grad();
          const at::Tensor loss = forward();
          const std::vector<bool> before = gathered_units(model);
          EXPECT_TRUE(before[0]);  // the model itself
          EXPECT_EQ(before[1], strategy == ShardingStrategy::shard_grad_op);
          const void* memory = model.handle(0).unsharded_flat_params()[0].data_ptr();
          model.summon_full_params([&] { EXPECT_EQ(model.module_ptr()->parameters()[0].scalar_type(), at::kDouble); },
                                   way);
          EXPECT_EQ(gathered_units(model), before);
          EXPECT_EQ(model.handle(0).unsharded_flat_params()[0].data_ptr(), memory);
          loss.backward();
          const std::vector<at::Tensor> found = unsharded_grads(model);
          for (std::size_t i = 0; i < found.size(); ++i) {
            ASSERT_EQ(found[i].defined(), expected[i].defined()) << i;
            EXPECT_TRUE(!found[i].defined() || at::equal(found[i], expected[i])) << i;
          }
        }
        // Changes that are not written back are changes of copies; others are gathered again, on all ranks.
        forward();
        const auto change = [&] { model->scale.fill_(group.rank() == 1 ? 3 : 1); };
        model.summon_full_params(change, {.writeback = false});
        EXPECT_TRUE(gathered_units(model)[0]);
        model.summon_full_params(change);
        EXPECT_FALSE(gathered_units(model)[0]);
        EXPECT_FALSE(gathered_units(model)[1] && strategy == ShardingStrategy::full_shard);
      }
    }
  });
}

TEST(FsdpTest, TheModelIsDestroyedBetweenForwardAndBackward) {
  run_local(2, [](const ProcessGroup& group) {
    for (const Options& way : kWays) {
      at::Tensor loss;
      {
        FullyShardedDataParallel<SmallModel> model(make_model(), group, way);
        loss = loss_of(model(batch_of(0, group.rank())));
      }
      EXPECT_ERROR(loss.backward(), ErrorCode::invalid_argument, "computed this result was destroyed");
    }
  });
}

TEST(FsdpTest, AStateDictOrAnEvaluationAfterForward) {
  expect_same_gradients_after([](ShardedModule& model) { model.state_dict(StateDictType::full); });
  expect_same_gradients_after([](FullyShardedDataParallel<SmallModel>& model) {
    const at::NoGradGuard no_grad;
    model.eval();
    model(batch_of(2, 0, at::kFloat));
    model.train();
  });
}

struct OrderedImpl : torch::nn::Module {
  OrderedImpl() {
    for (int i = 0; i < 4; ++i) {
      layers.push_back(register_module("layer" + std::to_string(i), Wrap<torch::nn::Linear>(5, 5)));
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (const std::size_t i : order) x = at::tanh(layers[i](x));
    return x;
  }
  std::vector<Wrap<torch::nn::Linear>> layers;
  std::vector<std::size_t> order{0, 1, 2, 3};
};
TORCH_MODULE(Ordered);

Ordered make_ordered() {
  Ordered model;
  fill(*model);
  return model;
}

const std::vector<std::size_t> kOrders[] = {{0, 1, 2, 3}, {0, 2, 3}, {0, 1, 2, 3, 3}, {3, 2, 1, 0}, {1}, {0, 1, 2, 3}};

TEST(FsdpOrderTest, AllRanksMayChangeTheOrderOfUnits) {
  run_local(2, [&](const ProcessGroup& group) {
    FullyShardedDataParallel<Ordered> model(make_ordered(), group);
    for (const std::vector<std::size_t>& order : kOrders) {
      Ordered expected = make_ordered();
      model->order = expected->order = order;
      model.zero_grad();
      backward_of_all(expected, {0}, 2);
      loss_of(model(batch_of(0, group.rank()))).backward();
      expect_same_grads(unsharded_grads(model), *expected);
    }
  });
}

TEST(FsdpOrderTest, ARankThatChangesTheOrderAloneIsNamed) {
  for (const std::vector<std::size_t>& order : {kOrders[1], kOrders[2], kOrders[3]}) {
    const auto begin = std::chrono::steady_clock::now();
    run_local(3, [&](const ProcessGroup& group) {
      FullyShardedDataParallel<Ordered> model(make_ordered(), group);
      loss_of(model(batch_of(0, 0))).backward();
      if (group.rank() == 1) model->order = order;
      try {
        loss_of(model(batch_of(0, 0))).backward();
        ADD_FAILURE() << "rank " << group.rank() << " found nothing";
      } catch (const Error& error) {
        EXPECT_THAT(error.what(), ::testing::HasSubstr("rank 1 left the order of the previous forward: at call "));
      }
    });
    EXPECT_LT(std::chrono::steady_clock::now() - begin, testing::kSoon);
  }
}

thread_local std::map<std::string, int> ranges;

// Profilers see what forward and backward do.
TEST(FsdpTest, RangesForProfilers) {
  const auto begin = [](const at::RecordFunction& range) -> std::unique_ptr<at::ObserverContext> {
    ++ranges[range.name()];
    return nullptr;
  };
  const auto handle =
      at::addThreadLocalCallback(at::RecordFunctionCallback(begin).scopes({at::RecordScope::USER_SCOPE}));
  FullyShardedDataParallel<SmallModel> model(make_model());
  loss_of(model(batch_of(0, 0))).backward();
  at::removeCallback(handle);
  EXPECT_EQ(ranges["FullyShardedDataParallel.forward "], 1);
  EXPECT_EQ(ranges["FullyShardedDataParallel.forward twice"], 2);
  EXPECT_GE(ranges["FullyShardedDataParallel.unshard"], 6);
  EXPECT_EQ(ranges["FullyShardedDataParallel.pre_backward"], 6);
  EXPECT_EQ(ranges["FullyShardedDataParallel.post_backward"], 5);
  EXPECT_EQ(ranges["FullyShardedDataParallel.reduce"], 5);
}

struct NormalizedImpl : torch::nn::Module {
  NormalizedImpl() {
    in = register_module("in", torch::nn::Linear(5, 4));
    norm = register_module("norm", torch::nn::BatchNorm1d(4));
    plain = register_module("plain", torch::nn::BatchNorm1d(torch::nn::BatchNormOptions(4).affine(false)));
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor y = norm(in(x));
    dtypes = {in->weight.scalar_type(), norm->weight.scalar_type(), norm->running_mean.scalar_type(), y.scalar_type()};
    return y;
  }
  torch::nn::Linear in{nullptr};
  torch::nn::BatchNorm1d norm{nullptr}, plain{nullptr};
  std::vector<at::ScalarType> dtypes;
};
TORCH_MODULE(Normalized);

TEST(FsdpTest, BatchNormsKeepTheirPrecision) {
  run_local(2, [](const ProcessGroup& group) {
    Options options;
    options.mixed_precision.param_dtype = at::kBFloat16;
    options.mixed_precision.buffer_dtype = at::kBFloat16;
    Normalized plain;
    FullyShardedDataParallel<Normalized> model(plain, group, options);
    EXPECT_EQ(model.unit_name(1), "norm");
    loss_of(model(batch_of(0, group.rank(), at::kFloat))).backward();
    EXPECT_EQ(plain->dtypes, (std::vector{at::kBFloat16, at::kFloat, at::kFloat, at::kBFloat16}));
    EXPECT_EQ(plain->plain->running_mean.scalar_type(), at::kFloat);
    EXPECT_TRUE(model.handle(1).sharded_gradient().defined());
    options.keeps_full_precision = nullptr;
    Normalized cast;
    FullyShardedDataParallel<Normalized> all(cast, group, options);
    EXPECT_EQ(all.unit_count(), 1);
    all(batch_of(0, group.rank(), at::kFloat));
    EXPECT_EQ(cast->dtypes, (std::vector{at::kBFloat16, at::kBFloat16, at::kBFloat16, at::kBFloat16}));
  });
}

TEST(FsdpTest, TheCallersInputsKeepTheirDtype) {
  Options options;
  options.mixed_precision.param_dtype = at::kBFloat16;
  at::Tensor input = at::ones({2, 3});
  FullyShardedDataParallel<Wrap<torch::nn::Linear>> wrapped(Wrap<torch::nn::Linear>(3, 4), {}, options);
  EXPECT_EQ(wrapped(input).scalar_type(), at::kBFloat16);
  FullyShardedDataParallel<torch::nn::Linear> plain(torch::nn::Linear(3, 4), {}, options);
  EXPECT_EQ(plain(input).scalar_type(), at::kBFloat16);
  EXPECT_EQ(input.scalar_type(), at::kFloat);
}

TEST(FsdpTest, BuffersOfIgnoredModulesKeepTheirDtype) {
  struct CountingImpl : torch::nn::Module {
    CountingImpl() { count = register_buffer("count", at::zeros({2})); }
    at::Tensor count;
  };
  SmallModel plain = make_model(at::kFloat);
  const auto counting = plain->register_module("counting", std::make_shared<CountingImpl>());
  Options options;
  options.mixed_precision.buffer_dtype = at::kBFloat16;
  options.ignored_modules = {counting};
  FullyShardedDataParallel<SmallModel> model(plain, {}, options);
  model(batch_of(0, 0, at::kFloat));
  EXPECT_EQ(plain->count.scalar_type(), at::kBFloat16);
  EXPECT_EQ(counting->count.scalar_type(), at::kFloat);
  options.ignored_modules = {nullptr};
  EXPECT_ERROR(FullyShardedDataParallel<SmallModel>(make_model(), {}, options), ErrorCode::invalid_argument,
               "ignored_modules contains null");
  options.ignored_modules = {};
  options.ignored_parameters = {at::Tensor()};
  EXPECT_ERROR(FullyShardedDataParallel<SmallModel>(make_model(), {}, options), ErrorCode::invalid_argument,
               "ignored_parameters contains an undefined tensor");
}

TEST(FsdpFailedBackwardTest, AnythingMayFollowABackwardThatThrew) {
  using Sharded = FullyShardedDataParallel<SmallModel>;
  const std::vector<std::function<void(Sharded&, torch::optim::SGD&)>> nexts{
      [](Sharded& model, torch::optim::SGD&) { const auto no_sync = model.no_sync(); },
      [](Sharded& model, torch::optim::SGD&) { const auto no_sync = model.no_sync(/*off=*/true); },
      [](Sharded& model, torch::optim::SGD&) {
        const StateDict state = model.state_dict(StateDictType::full, {.rank0_only = false});
        EXPECT_TRUE(at::equal(state.at("scale").get<at::Tensor>(), make_model()->scale));
      },
      [](Sharded& model, torch::optim::SGD&) { model.summon_full_params([] {}); },
      [](Sharded& model, torch::optim::SGD&) { EXPECT_EQ(model.clip_grad_norm_(1.0).item<double>(), 0.0); },
      [](Sharded& model, torch::optim::SGD& optimizer) { model.optim_state_dict(optimizer); },
      [](Sharded& model, torch::optim::SGD&) {
        model.unshard();
        EXPECT_EQ(model.handle(1).is_gathered(), is_sharded(model.options().strategy));
      },
      [](Sharded& model, torch::optim::SGD&) { model.reshard(); }};
  SmallModel alone = make_model();
  backward_of_all(alone, {0}, 2);
  run_local(2, [&](const ProcessGroup& group) {
    for (std::size_t i = 0; i < nexts.size(); ++i) {
      Sharded model(make_model(), group, kWays[i % std::size(kWays)]);
      torch::optim::SGD optimizer(model.parameters(), torch::optim::SGDOptions(0.1));
      const at::Tensor input = batch_of(1, group.rank()).requires_grad_(true) * 1.0;
      input.register_hook([](const at::Tensor&) { throw std::runtime_error("in backward"); });
      EXPECT_THROW(loss_of(model(input)).backward(), std::runtime_error);
      model.zero_grad();
      nexts[i](model, optimizer);
      loss_of(model(batch_of(0, group.rank()))).backward();
      expect_same_grads(unsharded_grads(model), *alone);
    }
  });
}

struct TasksImpl : torch::nn::Module {
  TasksImpl() {
    trunk = register_module("trunk", Wrap<torch::nn::Linear>(5, 5));
    for (int i = 0; i < 2; ++i) {
      heads.push_back(register_module("head" + std::to_string(i), Wrap<torch::nn::Linear>(5, 3)));
    }
  }
  at::Tensor forward(const at::Tensor& x, std::size_t task) { return heads[task](at::tanh(trunk(x))); }
  Wrap<torch::nn::Linear> trunk{nullptr};
  std::vector<Wrap<torch::nn::Linear>> heads;
};
TORCH_MODULE(Tasks);

TEST(FsdpTest, GradientsOfUnitsThatOnlyBackwardsWithoutSynchronizationReachAreReduced) {
  enum class Between { nothing, freezes, resets };
  for (const Between between : {Between::nothing, Between::freezes, Between::resets}) {
    const auto make = [] {
      Tasks model;
      fill(*model);
      return model;
    };
    const auto change = [between](Tasks model) {
      for (const at::Tensor& param : model->heads[0]->parameters()) {
        if (between == Between::freezes) param.set_requires_grad(false);
      }
    };
    constexpr int kRanks = 4;
    Tasks alone = make();
    for (int rank = 0; rank < kRanks; ++rank) {
      if (between != Between::resets) {
        (loss_of(alone->forward(batch_of(0, rank), 0)) / kRanks).backward();
      }
      (loss_of(alone->forward(batch_of(1, rank), 1)) / kRanks).backward();
    }
    run_local(kRanks, [&](const ProcessGroup& group) {
      const HybridGroups hybrid = hybrid_groups(group, 2);
      std::vector<Options> ways(std::begin(kWays), std::end(kWays));
      ways.push_back(options_of(ShardingStrategy::hybrid_shard, true));
      ways.back().replicas = hybrid.replicas;
      for (const Options& way : ways) {
        if (between == Between::freezes && !way.use_orig_params) continue;
        Tasks plain = make();
        FullyShardedDataParallel<Tasks> model(plain, way.replicas ? hybrid.shards : group, way);
        {
          const auto no_sync = model.no_sync();
          loss_of(model(batch_of(0, group.rank()), 0)).backward();
        }
        change(plain);
        if (between == Between::resets) model.zero_grad();
        loss_of(model(batch_of(1, group.rank()), 1)).backward();
        expect_same_grads(unsharded_grads(model), *alone);
        model.clip_grad_norm_(1.0);
      }
    });
  }
}

TEST(FsdpTest, AParameterThatIsFrozenKeepsItsGradient) {
  const auto train = [](auto& model, SmallModel plain, int rank, int ranks, int steps) {
    const auto backward = [&](int step) { (loss_of(model(batch_of(step, rank))) / ranks).backward(); };
    backward(0);
    if (steps == 1) return;
    plain->first->up->weight.set_requires_grad(false);
    backward(1);
    plain->first->up->weight.set_requires_grad(true);
    if (steps == 2) return;
    for (const at::Tensor& param : unique_params(*plain)) {
      if (param.grad().defined()) param.mutable_grad().zero_();
    }
    backward(2);
  };
  for (const int steps : {2, 3}) {
    SmallModel alone = make_model();
    std::vector<at::Tensor> sums;
    for (const int rank : {0, 1}) {
      SmallModel of_rank = make_model();
      train(of_rank, of_rank, rank, 2, steps);
      for (std::size_t i = 0; i < unique_params(*alone).size(); ++i) {
        const at::Tensor grad = unique_params(*of_rank)[i].grad();
        at::Tensor& sum = unique_params(*alone)[i].mutable_grad();
        if (grad.defined()) sum = sum.defined() ? sum + grad : grad.clone();
      }
    }
    run_local(2, [&](const ProcessGroup& group) {
      for (const Options& way : kWays) {
        if (!way.use_orig_params) continue;
        FullyShardedDataParallel<SmallModel> model(make_model(), group, way);
        train(model, model.module(), group.rank(), 1, steps);
        expect_same_grads(unsharded_grads(model), *alone);
      }
    });
  }
}

// Records how many hooks the node has that accumulates the gradient of `kept`.
struct HookedImpl : torch::nn::Module {
  HookedImpl() {
    kept = register_parameter("kept", at::ones({5}));
    toggled = register_parameter("toggled", at::ones({5}));
  }
  at::Tensor forward(const at::Tensor& x) {
    hooks.push_back(torch::autograd::impl::grad_accumulator(kept)->post_hooks().size());
    return x * kept * toggled;
  }
  at::Tensor kept, toggled;
  std::vector<std::size_t> hooks;
};
TORCH_MODULE(Hooked);

TEST(FsdpTest, NoHooksAreAddedToAParameterWhileAnotherIsFrozenAndUnfrozen) {
  FullyShardedDataParallel<Hooked> model{Hooked()};
  for (int step = 0; step < 20; ++step) {
    model->toggled.set_requires_grad(step % 2 == 0);
    model(at::ones({2, 5})).sum().backward();
  }
  EXPECT_EQ(model->hooks.back(), model->hooks.front());
}

}  // namespace
}  // namespace tessera::fsdp
