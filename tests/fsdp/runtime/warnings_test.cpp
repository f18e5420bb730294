// Warnings of sharded models: each text once in a process.

#include "support/warnings.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/linear.h>

#include <cstdlib>
#include <memory>
#include <string>

#include "fsdp/small_model.h"
#include "tessera/comm/local_ranks.h"

namespace tessera::fsdp {
namespace {

using testing::WarningGuard;
using testing::Warnings;
using Model = FullyShardedDataParallel<SmallModel>;

void step_of(Model& model) { loss_of(model(batch_of(0, model.group().rank()))).backward(); }

TEST(FsdpWarningTest, AGroupOfOneRankAndAnIgnoredModel) {
  Warnings warnings;
  const WarningGuard guard(warnings);
  Options options;
  const Model none(make_model(), {}, options_of(ShardingStrategy::no_shard, true));
  EXPECT_EQ(warnings.count(""), 0);
  for (int times = 0; times < 2; ++times) const Model model(make_model());
  EXPECT_EQ(warnings.count("the group has one rank, so the strategy is no_shard in place of full_shard"), 1);
  const SmallModel ignored = make_model();
  options.ignored_modules = {ignored.ptr()};
  const Model model(ignored, {}, options);
  EXPECT_EQ(warnings.count("ignored_modules contains the model itself, so nothing is sharded"), 1);
  EXPECT_EQ(warnings.count(""), 2);
}

struct WithNormImpl : torch::nn::Module {
  WithNormImpl() {
    in = register_module("in", torch::nn::Linear(5, 4));
    norm = register_module("norm", torch::nn::BatchNorm1d(4));
  }
  at::Tensor forward(const at::Tensor& x) { return norm(in(x)); }
  torch::nn::Linear in{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
};

TEST(FsdpWarningTest, UnitsThatCostMoreThanItSeems) {
  Warnings warnings;
  run_local(2, [&](const ProcessGroup& group) {
    const WarningGuard guard(warnings);
    const auto shard = [&](Options options, bool frozen) {
      auto plain = std::make_shared<WithNormImpl>();
      plain->in->bias.set_requires_grad(!frozen);
      const FullyShardedDataParallel<WithNormImpl> model(plain, group, std::move(options));
    };
    shard({}, false);
    EXPECT_EQ(warnings.count(""), 0);
    Options mixed;
    mixed.mixed_precision.param_dtype = at::kBFloat16;
    shard(mixed, false);
    shard({}, true);
  });
  EXPECT_EQ(warnings.count("1 of 2 units, such as 'norm', are single modules that keep their dtypes"), 1);
  EXPECT_EQ(warnings.count("1 of 1 units, such as '', have frozen parameters among others"), 1);
  EXPECT_EQ(warnings.count(""), 2);
}

TEST(FsdpWarningTest, SwitchesThatDisableAPart) {
  const char* const switches[] = {"FSDP_USE_FAKE_ALL_GATHER", "FSDP_USE_FAKE_REDUCE", "FSDP_SKIP_WRITEBACK_CHECK"};
  for (const char* name : switches) ::setenv(name, "1", 1);
  Warnings warnings;
  const WarningGuard guard(warnings);
  const Model model(make_model(), {}, options_of(ShardingStrategy::no_shard, true));
  for (const char* name : switches) {
    EXPECT_EQ(warnings.count(std::string(name) + "=1: "), 1) << name;
    ::unsetenv(name);
  }
}

TEST(FsdpWarningTest, ARankWithoutGradientsClipsInFloat32) {
  Warnings warnings;
  run_local(2, [&](const ProcessGroup& group) {
    const WarningGuard guard(warnings);
    Model model(make_model(), group);
    EXPECT_EQ(model.clip_grad_norm_(1).scalar_type(), at::kFloat);
    step_of(model);
    EXPECT_EQ(model.clip_grad_norm_(1).scalar_type(), at::kDouble);
  });
  for (const char* rank : {"rank 0", "rank 1"}) {
    EXPECT_EQ(warnings.count(std::string("clip_grad_norm_: ") + rank + " has no gradients"), 1);
  }
  EXPECT_EQ(warnings.count(""), 2);
}

// Assigns data and a gradient on rank 1 only.
void assign_on_one_rank(const ProcessGroup& group) {
  Model model(make_model(), group);
  if (group.rank() == 1) {
    const at::Tensor& weight = model->inner->weight;
    weight.set_data(at::ones_like(weight.detach()));
    weight.mutable_grad() = at::ones_like(weight.detach());
  }
  model.summon_full_params([] {}, {.with_grads = true});
}

TEST(FsdpWarningTest, WhatIsAssignedIsExplainedIfTheEnvironmentAsksForIt) {
  for (const char* level : {"", "INFO"}) {
    ::setenv("TORCH_DISTRIBUTED_DEBUG", level, 1);
    Warnings warnings;
    run_local(2, [&](const ProcessGroup& group) {
      const WarningGuard guard(warnings);
      assign_on_one_rank(group);
    });
    const int expected = *level == '\0' ? 0 : 1;
    EXPECT_EQ(warnings.count("data was assigned to sharded parameter 'inner.weight'"), expected);
    EXPECT_EQ(warnings.count("'inner.weight' has a gradient on other ranks only; on rank 0 it is 0"), expected);
  }
  ::unsetenv("TORCH_DISTRIBUTED_DEBUG");
}

TEST(FsdpWarningTest, PaddingIsExplainedIfTheEnvironmentAsksForIt) {
  for (const char* level : {"", "INFO"}) {
    ::setenv("TORCH_DISTRIBUTED_DEBUG", level, 1);
    Warnings warnings;
    run_local(2, [&](const ProcessGroup& group) {
      const WarningGuard guard(warnings);
      const FlatParamHandle padded({{"a", at::ones({3})}, {"b", at::ones({2})}}, group, {});
      const FlatParamHandle even({{"c", at::ones({8})}}, group, {});
    });
    const bool is_explained = *level != '\0';
    EXPECT_EQ(warnings.count("the parameters from 'a' on have 5 elements and the flat parameter 6: 1 are padding"),
              is_explained ? 1 : 0);
    EXPECT_EQ(warnings.count(""), is_explained ? 1 : 0);
  }
  ::unsetenv("TORCH_DISTRIBUTED_DEBUG");
}

}  // namespace
}  // namespace tessera::fsdp
