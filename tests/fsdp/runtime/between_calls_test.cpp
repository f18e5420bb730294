// Changes to a sharded model between its calls, and what a unit leaves alone.

#include <ATen/record_function.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/linear.h>

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "fsdp/grads.h"
#include "fsdp/small_model.h"
#include "support/error_matchers.h"
#include "support/rank_processes.h"
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
void expect_same_gradients_after(const std::function<void(FullyShardedDataParallel<SmallModel>&)>& between) {
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

}  // namespace
}  // namespace tessera::fsdp
