// Models inside a model that are sharded before it.

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/optim/adamw.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "fsdp/grads.h"
#include "fsdp/small_model.h"
#include "support/error_matchers.h"
#include "support/temporary_directory.h"
#include "tessera/comm/local_ranks.h"
#include "tessera/state/load.h"
#include "tessera/state/module_state.h"
#include "tessera/state/save.h"

namespace tessera::fsdp {
namespace {

using ::testing::ElementsAre;
using testing::TemporaryDirectory;

// `Inner` holds a SmallModelImpl.
template <typename Inner>
struct OuterImpl : torch::nn::Module {
  explicit OuterImpl(Inner small) {
    inner = register_module("inner", std::move(small));
    head = register_module("head", Wrap<torch::nn::Linear>(3, 2));
    bias = register_parameter("bias", at::ones({2}));
    fill(*this);
  }
  at::Tensor forward(const at::Tensor& x) { return head(at::tanh(inner(x))) + bias; }
  Inner inner{nullptr};
  Wrap<torch::nn::Linear> head{nullptr};
  at::Tensor bias;
};
template <typename Inner>
using Outer = torch::nn::ModuleHolder<OuterImpl<Inner>>;

// Optimizers of the inner model, made before the outer one is sharded, and of the rest.
struct Optimizers {
  explicit Optimizers(const std::vector<at::Tensor>& of_inner) : first(make(of_inner)) {
    for (const at::Tensor& param : of_inner) known.push_back(param);
  }
  void add_rest(const std::vector<at::Tensor>& all) {
    std::vector<at::Tensor> rest;
    std::copy_if(all.begin(), all.end(), std::back_inserter(rest), [&](const at::Tensor& param) {
      return std::none_of(known.begin(), known.end(), [&](const at::Tensor& other) { return other.is_same(param); });
    });
    second = make(rest);
  }
  void step() {
    first->step();
    second->step();
  }
  static std::unique_ptr<torch::optim::AdamW> make(const std::vector<at::Tensor>& params) {
    return std::make_unique<torch::optim::AdamW>(params, torch::optim::AdamWOptions(0.02));
  }
  std::vector<at::Tensor> known;
  std::unique_ptr<torch::optim::AdamW> first, second;
};

void expect_close(const StateDict& found, const StateDict& expected) {
  ASSERT_EQ(found.size(), expected.size());
  for (const auto& [name, value] : expected) {
    EXPECT_TRUE(at::allclose(found.at(name).get<at::Tensor>(), value.get<at::Tensor>(), 1e-10, 1e-12))
        << std::get<std::string>(name);
  }
}

const StateOptions kEachRank{.rank0_only = false};

// Trains the inner model for one step and the outer one for two, on one process: the expected state.
template <typename Inner>
StateDict state_of_one_process(int ranks) {
  Outer<Inner> alone{Inner()};
  Optimizers optimizers(unique_params(*alone->inner));
  backward_of_all(alone->inner, {0}, ranks);
  optimizers.first->step();
  optimizers.add_rest(unique_params(*alone));
  for (const int step : {1, 2}) {
    backward_of_all(alone, {step}, ranks);
    optimizers.step();
  }
  return get_model_state_dict(*alone);
}

template <typename Model>
void backward_of_step(Model& model, int step) {
  model.zero_grad();
  loss_of(model(batch_of(step, model.group().rank()))).backward();
}

template <typename Inner>
void expect_training(int ranks, const Options& inner_options, const Options& outer_options) {
  const StateDict expected = state_of_one_process<Inner>(ranks);
  const TemporaryDirectory directory;
  run_local(ranks, [&](const ProcessGroup& group) {
    Outer<Inner> plain{Inner()};
    FullyShardedDataParallel<Inner> inner(plain->inner, group, inner_options);
    Optimizers optimizers(inner.parameters());
    backward_of_step(inner, 0);
    optimizers.first->step();
    FullyShardedDataParallel<Outer<Inner>> outer(plain, group, outer_options);
    optimizers.add_rest(outer.parameters());
    for (const int step : {1, 2}) {
      backward_of_step(outer, step);
      optimizers.step();
    }
    const StateDict full = outer.state_dict(StateDictType::full, kEachRank);
    expect_close(full, expected);

    // The names of its states, and the states themselves, are those of a model that is sharded at once.
    const StateDict optim = outer.optim_state_dict(*optimizers.first, StateDictType::full, kEachRank);
    EXPECT_TRUE(optim.at("state").get<Dict>().contains("inner.head.weight"));
    save({{"model", outer.state_dict()}, {"optim", outer.optim_state_dict(*optimizers.first)}}, directory.path(),
         group);
    FullyShardedDataParallel<Outer<Inner>> other(Outer<Inner>{Inner()}, group, outer_options);
    StateDict state{{"model", other.state_dict()}};
    load(state, directory.path(), group);
    other.load_state_dict(state.at("model").get<Dict>());
    EXPECT_EQ(other.state_dict(StateDictType::full, kEachRank), full);
    outer.load_optim_state_dict(*optimizers.first, optim);
    EXPECT_EQ(outer.optim_state_dict(*optimizers.first, StateDictType::full, kEachRank), optim);
  });
}

class NestedWaysTest : public ::testing::TestWithParam<std::tuple<int, std::size_t, ShardingStrategy>> {};

// PyTorch: test_multiple_wrapping.
TEST_P(NestedWaysTest, AModelThatWasTrainedIsTrainedAsAPartOfAnother) {
  const auto [ranks, way, outer_strategy] = GetParam();
  const Options outer = options_of(outer_strategy, kWays[way].use_orig_params);
  expect_training<SmallModel>(ranks, kWays[way], outer);
  expect_training<Wrap<SmallModel>>(ranks, kWays[way], outer);
}

INSTANTIATE_TEST_SUITE_P(Ways, NestedWaysTest,
                         ::testing::Combine(::testing::Values(1, 3), ::testing::Range<std::size_t>(0, 5),
                                            ::testing::Values(ShardingStrategy::full_shard,
                                                              ShardingStrategy::no_shard)));

TEST(FsdpNestedTest, UnitsKeepTheirOptionsAndGetNewNames) {
  run_local(4, [](const ProcessGroup& group) {
    Outer<SmallModel> plain{SmallModel()};
    Options options = options_of(ShardingStrategy::shard_grad_op, true);
    options.mixed_precision.param_dtype = options.mixed_precision.reduce_dtype = at::kFloat;
    options.offload_params = true;
    const FullyShardedDataParallel<SmallModel> inner(plain->inner, group, options);
    FullyShardedDataParallel<Outer<SmallModel>> outer(plain, group);
    std::vector<std::string> names;
    for (std::size_t i = 0; i < outer.unit_count(); ++i) {
      names.push_back(outer.unit_name(i));
      const FlatParamOptions& of_unit = outer.handle(i).options();
      const bool is_inner = names.back().starts_with("inner");
      EXPECT_EQ(of_unit.strategy, is_inner ? options.strategy : ShardingStrategy::full_shard) << names.back();
      EXPECT_EQ(of_unit.mixed_precision.param_dtype.has_value(), is_inner) << names.back();
      EXPECT_EQ(of_unit.offload_params, is_inner) << names.back();
    }
    EXPECT_THAT(names, ElementsAre("", "inner.first", "inner.twice", "inner.inner", "inner.never", "inner.head",
                                   "inner", "head"));
    const FlatParamLayout& layout = outer.handle(6).layout();
    EXPECT_EQ(layout.params()[0].fqn, "inner.scale");
    EXPECT_EQ(layout.shared_params()[0].fqn, "inner.tied");
    EXPECT_EQ(inner.module_ptr(), plain->inner.ptr());
  });
}

TEST(FsdpNestedTest, GroupsOfReplicasAndCommHooksAreKept) {
  const StateDict expected = state_of_one_process<SmallModel>(4);
  run_local(4, [&](const ProcessGroup& group) {
    const HybridGroups hybrid = hybrid_groups(group, 2);
    Options options = options_of(ShardingStrategy::hybrid_shard, true);
    options.replicas = hybrid.replicas;
    Outer<SmallModel> plain{SmallModel()};
    FullyShardedDataParallel<SmallModel> inner(plain->inner, hybrid.shards, options);
    Optimizers optimizers(inner.parameters());
    backward_of_step(inner, 0);  // batches of the ranks of one group, not of all
    Options other = options;
    other.replicas = hybrid_groups(group, 2).replicas;  // the same ranks, but another group
    EXPECT_ERROR(FullyShardedDataParallel<Outer<SmallModel>>(plain, hybrid.shards, other), ErrorCode::invalid_argument,
                 "expected the groups of shards and of replicas of this model");
    const FullyShardedDataParallel<Outer<SmallModel>> outer(plain, hybrid.shards, options);
    EXPECT_EQ(outer.unit_count(), 8u);
  });
  run_local(2, [](const ProcessGroup& group) {
    Outer<SmallModel> plain{SmallModel()};
    FullyShardedDataParallel<SmallModel> inner(plain->inner, group);
    int calls = 0;
    const CommHook hook = [&](const at::Tensor& gradient, const at::Tensor& shard, const ProcessGroup& ranks) {
      ++calls;
      ranks.reduce_scatter_into(shard, gradient);
      return [] {};
    };
    inner.register_comm_hook(hook);
    FullyShardedDataParallel<Outer<SmallModel>> outer(plain, group);
    EXPECT_ERROR(outer.register_comm_hook(hook), ErrorCode::invalid_argument, "the model has a hook");
    backward_of_step(outer, 0);
    EXPECT_EQ(calls, 5);  // the units of the inner model that are called
  });
}

struct WithIgnoredImpl : torch::nn::Module {
  WithIgnoredImpl() {
    ignored = register_module("ignored", Block(5));
    block = ignored->register_module("block", Wrap<Block>(5));
    head = register_module("head", torch::nn::Linear(5, 2));
    fill(*this);
  }
  at::Tensor forward(const at::Tensor& x) { return head(block(ignored(x))); }
  Block ignored{nullptr};
  Wrap<Block> block{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(WithIgnored);

// PyTorch: test_ignored_modules_nested.
TEST(FsdpNestedTest, AModelInsideAnIgnoredModuleStaysSharded) {
  WithIgnored alone;
  backward_of_all(alone, {0}, 2);
  run_local(2, [&](const ProcessGroup& group) {
    WithIgnored plain;
    const FullyShardedDataParallel<Wrap<Block>> inner(plain->block, group);
    Options options;
    options.ignored_modules = {plain->ignored.ptr()};
    FullyShardedDataParallel<WithIgnored> outer(plain, group, options);
    EXPECT_EQ(outer.unit_count(), 2u);
    EXPECT_EQ(outer.unit_name(1), "ignored.block");
    backward_of_step(outer, 0);
    EXPECT_EQ(plain->ignored->up->weight.grad().dim(), 2);
    const std::vector<at::Tensor> found = unsharded_grads(outer);
    const auto names = alone->named_parameters();
    std::size_t i = 0;
    for (const auto& param : names) {
      const bool is_sharded = param.key().starts_with("ignored.block") || param.key().starts_with("head");
      EXPECT_EQ(at::allclose(found[i++], param.value().grad(), 1e-12, 1e-14), is_sharded) << param.key();
    }
  });
}

TEST(FsdpNestedTest, TheObjectOfAPartIsOfNoUse) {
  run_local(2, [](const ProcessGroup& group) {
    Outer<SmallModel> plain{SmallModel()};
    FullyShardedDataParallel<SmallModel> inner(plain->inner, group);
    const at::Tensor before = loss_of(inner(batch_of(0, group.rank())));
    std::optional<FullyShardedDataParallel<Outer<SmallModel>>> outer(std::in_place, plain, group);
    for (const auto& call : std::vector<std::function<void()>>{
             [&] { inner(batch_of(0, 0)); }, [&] { inner.state_dict(); }, [&] { inner.parameters(); },
             [&] { inner.summon_full_params([] {}); }, [&] { inner.unshard(); }, [&] { inner.clip_grad_norm_(1); }}) {
      EXPECT_ERROR(call(), ErrorCode::invalid_argument, "the model is a part of another one that was sharded since");
    }
    EXPECT_ERROR(before.backward(), ErrorCode::invalid_argument, "is a part of another one since");
    backward_of_step(*outer, 0);
    outer.reset();
    EXPECT_ERROR(inner.unit_count(), ErrorCode::invalid_argument, "the model is a part of another one");
  });
}

// Each is refused on all ranks, and the inner model stays usable.
TEST(FsdpNestedTest, WhatDoesNotFitIsRefused) {
  run_local(2, [](const ProcessGroup& group) {
    using Small = FullyShardedDataParallel<SmallModel>;
    SmallModel small = make_model();
    Outer<SmallModel> plain(small);
    Small inner(small, group);
    const auto expect_refused = [&](const std::string& why, const Options& options = {},
                                    const ProcessGroup* of_outer = nullptr) {
      EXPECT_ERROR(
          (FullyShardedDataParallel<Outer<SmallModel>>(plain, of_outer != nullptr ? *of_outer : group, options)),
          ErrorCode::invalid_argument, why);
      backward_of_step(inner, 0);
    };
    expect_refused("has another use_orig_params", options_of(ShardingStrategy::full_shard, false));
    {
      const auto no_sync = inner.no_sync();
      EXPECT_ERROR((FullyShardedDataParallel<Outer<SmallModel>>(plain, group)), ErrorCode::invalid_argument,
                   "is under no_sync");
    }
    inner.register_post_reduce_hook([](std::size_t) {});
    expect_refused("has a hook after reductions");
    inner.register_post_reduce_hook(nullptr);
    Options ignoring;
    ignoring.ignored_modules = {small.ptr()};
    expect_refused("ignored module 'inner' is sharded already", ignoring);
    ignoring.ignored_modules = {};
    ignoring.ignored_parameters = {small->inner->weight};
    expect_refused("ignored parameter 'inner.inner.weight' is sharded already", ignoring);
    const ProcessGroup alone;
    expect_refused("expected ranks of the model's group", {}, &alone);
    plain->register_module("again", small);
    expect_refused("'again' in this model has two names");

    EXPECT_ERROR(Small(small, group), ErrorCode::invalid_argument, "is sharded already");
    EXPECT_ERROR((FullyShardedDataParallel<Wrap<Block>>(small->first, group)), ErrorCode::invalid_argument,
                 "is sharded already");
    struct HolderImpl : torch::nn::Module {};
    const auto holder = std::make_shared<HolderImpl>();
    holder->register_module("part", small->first);
    EXPECT_ERROR(FullyShardedDataParallel<HolderImpl>(holder, group), ErrorCode::invalid_argument,
                 "module 'part' is sharded already", "everything that the other one shards");
    Options other;  // not in the model: of no importance
    other.ignored_modules = {small.ptr()};
    const Small unrelated(make_model(), group, other);
    backward_of_step(inner, 0);
  });
}

TEST(FsdpNestedTest, OneRankHasNotShardedTheInnerModel) {
  run_local(2, [](const ProcessGroup& group) {
    Outer<SmallModel> plain{SmallModel()};
    std::optional<FullyShardedDataParallel<SmallModel>> inner(std::in_place, plain->inner, group);
    if (group.rank() == 1) plain = Outer<SmallModel>{SmallModel()};
    EXPECT_ERROR((FullyShardedDataParallel<Outer<SmallModel>>(plain, group)), ErrorCode::invalid_argument,
                 "has unit 'inner.first' on CPU and rank 1 has parameter 'inner.scale'",
                 "expected the same on all ranks");
    backward_of_step(*inner, 0);
  });
}

}  // namespace
}  // namespace tessera::fsdp
