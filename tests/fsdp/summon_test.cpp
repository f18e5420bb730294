// Full parameters and gradients: summon_full_params and clip_grad_norm_.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <stdexcept>

#include "fsdp/small_model.h"
#include "support/error_matchers.h"
#include "tessera/comm/local_ranks.h"

namespace tessera::fsdp {
namespace {

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
