// Full parameters and gradients: summon_full_params and clip_grad_norm_.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "fsdp/grads.h"
#include "fsdp/small_model.h"
#include "support/error_matchers.h"
#include "support/warnings.h"
#include "tessera/comm/local_ranks.h"

namespace tessera::fsdp {
namespace {

using ::testing::ElementsAre;

TEST(SummonTest, WholeParametersCanBeComputedWith) {
  SmallModel alone = make_model();
  const at::Tensor expected = alone->forward(batch_of(0, 0));
  run_local(2, [&](const ProcessGroup& group) {
    FullyShardedDataParallel<SmallModel> model(make_model(), group);
    model.summon_full_params([&] {
      EXPECT_TRUE(at::equal(model->forward(batch_of(0, 0)), expected));
      EXPECT_TRUE(at::equal(model(batch_of(0, 0)), expected));
      EXPECT_EQ(model->first->forward(at::ones({2, 7}, at::kDouble)).sizes(), (std::vector<std::int64_t>{2, 7}));
    });
    EXPECT_TRUE(at::equal(model(batch_of(0, 0)), expected));
  });
}

TEST(SummonTest, WhatIsDoneToWholeParametersIsKeptIfAskedFor) {
  run_local(3, [&](const ProcessGroup& group) {
    for (const bool use_orig_params : {true, false}) {
      for (const auto strategy : {ShardingStrategy::full_shard, ShardingStrategy::no_shard}) {
        Options options;
        options.use_orig_params = use_orig_params;
        options.strategy = strategy;
        FullyShardedDataParallel<SmallModel> model(make_model(), group, options);
        SummonOptions keeps_not;
        keeps_not.writeback = false;
        const auto value_of = [&] {
          double value = 0;
          model.summon_full_params([&] { value = model->inner->weight.select(0, 4).sum().item<double>(); }, keeps_not);
          return value;
        };
        const double before = value_of();
        if (is_sharded(strategy)) {
          model.summon_full_params([&] { model->inner->weight.detach().add_(1); }, keeps_not);
          EXPECT_EQ(value_of(), before);
          EXPECT_ERROR(model.summon_full_params([&] {
            model->inner->weight.detach().add_(1);
            if (group.rank() == 1) throw std::runtime_error("no");
          }),
                       ErrorCode::rank_failure, "no");
          EXPECT_EQ(value_of(), before);
        }
        model.summon_full_params([&] { model->inner->weight.detach().add_(1); });
        EXPECT_NEAR(value_of(), before + 7, 1e-12);
        SummonOptions first_only = keeps_not;
        first_only.rank0_only = true;
        model.summon_full_params(
            [&] {
              const bool is_full = group.rank() == 0 || !is_sharded(strategy);
              EXPECT_EQ(model->inner->weight.dim(), is_full ? 2 : 1);
            },
            first_only);
      }
    }
    FullyShardedDataParallel<SmallModel> model(make_model(), group);
    SummonOptions both;
    both.rank0_only = true;
    EXPECT_ERROR(model.summon_full_params([] {}, both), ErrorCode::invalid_argument,
                 "rank0_only and writeback are both set");
  });
}

std::vector<std::string> unsharded_units(const ShardedModule& model) {
  std::vector<std::string> names;
  for (std::size_t i = 0; i < model.unit_count(); ++i) {
    if (model.handle(i).is_unsharded()) names.push_back(model.unit_name(i));
  }
  return names;
}

TEST(SummonTest, TheUnitsOfAModule) {
  SmallModel alone = make_model();
  const at::Tensor input = at::ones({2, 7}, at::kDouble);
  const at::Tensor expected = alone->first->forward(input);
  run_local(2, [&](const ProcessGroup& group) {
    FullyShardedDataParallel<SmallModel> model(make_model(), group);
    const auto units_of = [&](const torch::nn::Module* module, bool recurse) {
      std::vector<std::string> names;
      model.summon_full_params([&] { names = unsharded_units(model); }, {.module = module, .recurse = recurse});
      return names;
    };
    EXPECT_THAT(units_of(nullptr, true), ElementsAre("", "first", "twice", "inner", "never", "head"));
    EXPECT_THAT(units_of(nullptr, false), ElementsAre(""));
    EXPECT_THAT(units_of(model->first.get(), true), ElementsAre("first"));
    EXPECT_THAT(units_of(model->first->up.get(), false), ElementsAre("first"));  // a part of a unit

    const SummonOptions of_first{.module = model->first.get()};
    model.summon_full_params(
        [&] {
          EXPECT_TRUE(at::equal(model->first->forward(input), expected));
          EXPECT_EQ(model->twice->up->weight.dim(), 1);
          EXPECT_ERROR(model->twice->forward(input), ErrorCode::invalid_argument,
                       "'twice' was called in summon_full_params of other units");
          EXPECT_ERROR(model(batch_of(0, 0)), ErrorCode::invalid_argument, "the model itself was called");
          model->first->up->bias.detach().fill_(3);
        },
        of_first);
    model.summon_full_params([&] {
      EXPECT_EQ(model->first->up->bias.mean().item<double>(), 3);
      EXPECT_NE(model->twice->up->bias.mean().item<double>(), 3);
    });

    const SmallModel other = make_model();  // of this rank: a module stores its name when it is first asked for it
    EXPECT_ERROR(units_of(other.get(), true), ErrorCode::invalid_argument, "is not in the model");
    EXPECT_ERROR(units_of(group.rank() == 0 ? model->first.get() : model->twice.get(), true),
                 ErrorCode::invalid_argument, "rank 0 has unit first and rank 1 has unit twice");
    EXPECT_ERROR(model.summon_full_params([&] { model.summon_full_params([] {}); }), ErrorCode::invalid_argument,
                 "called in itself");
    EXPECT_THAT(unsharded_units(model), ElementsAre());
  });
}

TEST(SummonTest, ChangesToGradientsAreKept) {
  run_local(3, [&](const ProcessGroup& group) {
    for (const Options& way : kWays) {
      FullyShardedDataParallel<SmallModel> model(make_model(), group, way);
      loss_of(model(batch_of(0, group.rank()))).backward();
      const std::vector<at::Tensor> before = unsharded_grads(model);
      const auto change = [&](bool writeback) {
        model.summon_full_params(
            [&] {
              for (const at::Tensor& param : unique_params(*model.module())) {
                if (param.grad().defined()) param.mutable_grad() = param.grad() * 2;
              }
              model->scale.mutable_grad().reset();
              model->never->up->bias.mutable_grad() = at::ones_like(model->never->up->bias);
            },
            {.writeback = writeback, .with_grads = true});
      };
      change(false);
      const std::vector<at::Tensor> same = unsharded_grads(model);
      for (std::size_t i = 0; i < before.size(); ++i) {
        ASSERT_EQ(same[i].defined(), before[i].defined());
        if (!same[i].defined()) continue;
        EXPECT_TRUE(at::equal(same[i], before[i])) << i;
      }
      change(true);
      model.summon_full_params(
          [&] {
            const std::vector<at::Tensor> params = unique_params(*model.module());
            for (std::size_t i = 0; i < params.size(); ++i) {
              const at::Tensor& grad = params[i].grad();
              if (params[i].is_same(model->scale)) {
                EXPECT_TRUE(!grad.defined() || grad.abs().max().item<double>() == 0);
              } else if (params[i].is_same(model->never->up->bias)) {
                EXPECT_TRUE(at::equal(grad, at::ones_like(grad)));
              } else if (before[i].defined()) {
                EXPECT_TRUE(at::allclose(grad, before[i] * 2)) << i;
              }
            }
          },
          {.writeback = false, .with_grads = true});
      EXPECT_ERROR(model.summon_full_params([&] {
        if (group.rank() == 1) model->inner->weight.set_data(at::ones({2}, at::kDouble));
      }),
                   ErrorCode::invalid_argument, "'inner.weight' has shape [2], expected [5, 7]");
    }
  });
}

// PyTorch: test_with_grads_core.
TEST(SummonTest, GradientsBetweenForwardAndBackwardAreThoseOfTheBackwardBefore) {
  SmallModel alone = make_model(), both = make_model();
  backward_of_all(alone, {0}, 2);
  backward_of_all(both, {0, 1}, 2);
  run_local(2, [&](const ProcessGroup& group) {
    for (const Options& way : kWays) {
      FullyShardedDataParallel<SmallModel> model(make_model(), group, way);
      loss_of(model(batch_of(0, group.rank()))).backward();
      const at::Tensor loss = loss_of(model(batch_of(1, group.rank())));
      expect_same_grads(unsharded_grads(model), *alone);
      loss.backward();
      expect_same_grads(unsharded_grads(model), *both);
      model.zero_grad();
      const at::Tensor again = loss_of(model(batch_of(0, group.rank())));
      for (const at::Tensor& grad : unsharded_grads(model)) {
        EXPECT_TRUE(!grad.defined() || grad.abs().max().item<double>() == 0);
      }
      again.backward();
      expect_same_grads(unsharded_grads(model), *alone);
    }
  });
}

// PyTorch: test_unshard_params_writeback, test_unshard_params_writeback_no_shard.
TEST(SummonTest, InMixedPrecisionChangesAreKeptAsTheyAre) {
  run_local(3, [&](const ProcessGroup& group) {
    for (Options way : kWays) {
      way.mixed_precision.param_dtype = at::kBFloat16;
      FullyShardedDataParallel<SmallModel> model(make_model(at::kFloat), group, way);
      const auto values = [&] {
        std::vector<at::Tensor> found;
        model.summon_full_params(
            [&] {
              for (const at::Tensor& param : unique_params(*model.module())) {
                EXPECT_EQ(param.scalar_type(), at::kFloat);
                found.push_back(param.detach().clone());
              }
            },
            {.writeback = false});
        return found;
      };
      model(batch_of(0, group.rank(), at::kFloat)).sum().backward();
      const std::vector<at::Tensor> before = values();
      const auto add = [&](bool writeback) {
        model.summon_full_params(
            [&] {
              for (const at::Tensor& param : unique_params(*model.module())) param.detach().add_(1.0 / 1024);
            },
            {.writeback = writeback});
      };
      if (is_sharded(way.strategy)) {
        add(false);
        const std::vector<at::Tensor> same = values();
        for (std::size_t i = 0; i < before.size(); ++i) EXPECT_TRUE(at::equal(same[i], before[i])) << i;
      }
      add(true);
      const std::vector<at::Tensor> after = values();
      for (std::size_t i = 0; i < before.size(); ++i) {
        EXPECT_TRUE(at::equal(after[i], before[i] + 1.0 / 1024)) << i;  // bfloat16 would round it
      }
      EXPECT_EQ(model(batch_of(0, group.rank(), at::kFloat)).scalar_type(), at::kBFloat16);
    }
  });
}

// PyTorch: test_unshard_params_param_data.
TEST(SummonTest, ParametersAndGradientsOnTheCpu) {
  SmallModel alone = make_model();
  backward_of_all(alone, {0}, 2);
  testing::Warnings warnings;
  const char* const warning = "offload_to_cpu without rank0_only";
  run_local(2, [&](const ProcessGroup& group) {
    const testing::WarningGuard guard(warnings);
    for (const Options& way : kWays) {
      FullyShardedDataParallel<SmallModel> model(make_model(), group, way);
      loss_of(model(batch_of(0, group.rank()))).backward();
      const auto expect_all = [&](double added) {
        const std::vector<at::Tensor> found = unique_params(*model.module()), expected = unique_params(*alone);
        std::vector<at::Tensor> grads;
        for (std::size_t i = 0; i < found.size(); ++i) {
          EXPECT_TRUE(found[i].is_cpu() && at::equal(found[i], expected[i] + added)) << i;
          EXPECT_TRUE(!found[i].grad().defined() || found[i].grad().is_cpu()) << i;
          grads.push_back(found[i].grad());
        }
        expect_same_grads(grads, *alone);
      };
      SummonOptions on_rank_0{.writeback = false, .rank0_only = true, .offload_to_cpu = true, .with_grads = true};
      model.summon_full_params(
          [&] {
            if (group.rank() == 0) expect_all(0);
          },
          on_rank_0);
      EXPECT_TRUE(group.rank() != 0 || &way != &kWays[0] || warnings.count(warning) == 0);
      const SummonOptions on_all{.offload_to_cpu = true, .with_grads = true};
      model.summon_full_params(
          [&] {
            expect_all(0);
            for (const at::Tensor& param : unique_params(*model.module())) param.detach().add_(1);
          },
          on_all);
      model.summon_full_params([&] { expect_all(1); }, on_all);
    }
  });
  EXPECT_EQ(warnings.count(warning), 1);
}

TEST(SummonTest, NotInBackward) {
  run_local(2, [&](const ProcessGroup& group) {
    FullyShardedDataParallel<SmallModel> model(make_model(), group);
    const at::Tensor first = model(batch_of(0, group.rank()));
    first.register_hook([&](const at::Tensor&) {
      EXPECT_ERROR(model.summon_full_params([] {}), ErrorCode::invalid_argument,
                   "summon_full_params: called in backward of the model");
    });
    loss_of(first).backward();
  });
}

struct SummonsImpl : torch::nn::Module {
  SummonsImpl() { linear = register_module("linear", Wrap<torch::nn::Linear>(3, 3)); }
  at::Tensor forward(const at::Tensor& x) {
    EXPECT_ERROR(model->summon_full_params([] {}), ErrorCode::invalid_argument,
                 "summon_full_params: called in forward of the model");
    return linear(x);
  }
  Wrap<torch::nn::Linear> linear{nullptr};
  ShardedModule* model = nullptr;
};
TORCH_MODULE(Summons);

TEST(SummonTest, NotInForward) {
  run_local(2, [&](const ProcessGroup& group) {
    FullyShardedDataParallel<Summons> model(Summons(), group);
    model->model = &model;
    model(at::ones({2, 3})).sum().backward();
    EXPECT_EQ(unsharded_grads(model).size(), 2u);
  });
}

TEST(SummonTest, TheNormOfAllGradientsIsClipped) {
  SmallModel alone = make_model();
  backward_of_all(alone, {0}, 3);
  const auto norm_of_all = [&](double type) {
    std::vector<at::Tensor> flat;
    for (const at::Tensor& param : unique_params(*alone)) {
      if (param.grad().defined()) flat.push_back(param.grad().reshape({-1}));
    }
    return at::cat(flat).norm(type).item<double>();
  };
  for (const auto strategy : {ShardingStrategy::full_shard, ShardingStrategy::no_shard}) {
    for (const bool use_orig_params : {true, false}) {
      run_local(3, [&](const ProcessGroup& group) {
        for (const double type : {1.0, 2.0, 3.0, std::numeric_limits<double>::infinity()}) {
          Options options;
          options.strategy = strategy;
          options.use_orig_params = use_orig_params;
          FullyShardedDataParallel<SmallModel> model(make_model(), group, options);
          loss_of(model(batch_of(0, group.rank()))).backward();
          const double norm = norm_of_all(type);
          EXPECT_NEAR(model.clip_grad_norm_(100 * norm, type).item<double>(), norm, 1e-12);
          EXPECT_NEAR(model.clip_grad_norm_(norm / 2, type).item<double>(), norm, 1e-12);
          EXPECT_NEAR(model.clip_grad_norm_(1, type).item<double>(), norm / 2, 1e-5);
        }
      });
    }
  }
  FullyShardedDataParallel<SmallModel> model(make_model());
  const auto no_sync = model.no_sync();
  loss_of(model(batch_of(0, 0))).backward();
  EXPECT_ERROR(model.clip_grad_norm_(1), ErrorCode::invalid_argument, "was not reduced");
}

TEST(SummonTest, ANormThatIsNoNumberIsNoneOnAllRanks) {
  for (int broken = 0; broken < 3; ++broken) {
    run_local(3, [&](const ProcessGroup& group) {
      for (const double type : {2.0, std::numeric_limits<double>::infinity()}) {
        Options options;
        options.use_orig_params = false;
        FullyShardedDataParallel<SmallModel> model(make_model(), group, options);
        loss_of(model(batch_of(0, group.rank()))).backward();
        if (group.rank() == broken) model.parameters()[0].grad()[0] = std::nan("");
        EXPECT_TRUE(std::isnan(model.clip_grad_norm_(1, type).item<double>())) << type << " of rank " << broken;
      }
    });
  }
}

}  // namespace
}  // namespace tessera::fsdp
