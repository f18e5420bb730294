// Units that only some ranks have and shard: a mixture of experts.

#include <gtest/gtest.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/optim/adamw.h>

#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "fsdp/small_model.h"
#include "support/error_matchers.h"
#include "support/temporary_directory.h"
#include "tessera/comm/local_ranks.h"
#include "tessera/fsdp/meta_init.h"
#include "tessera/state/load.h"
#include "tessera/state/save.h"

namespace tessera::fsdp {
namespace {

using testing::TemporaryDirectory;

constexpr int kExperts = 2;

struct ExpertImpl : torch::nn::Module {
  ExpertImpl() { layer = register_module("layer", torch::nn::Linear(7, 7)); }
  at::Tensor forward(const at::Tensor& x) { return at::tanh(layer(x)); }
  torch::nn::Linear layer{nullptr};
};
TORCH_MODULE(Expert);

struct NoExpertImpl : torch::nn::Module {};
TORCH_MODULE(NoExpert);

// Batches take turns at the experts. A rank has the experts of its own batches; one process has all.
struct MixtureImpl : torch::nn::Module {
  explicit MixtureImpl(const std::vector<int>& experts_here) {
    before = register_module("before", torch::nn::Linear(5, 7));
    experts = register_module("experts", torch::nn::ModuleList());
    for (int i = 0; i < kExperts; ++i) {
      if (std::find(experts_here.begin(), experts_here.end(), i) != experts_here.end()) {
        experts->push_back(Expert());
      } else {
        experts->push_back(NoExpert());
      }
    }
    after = register_module("after", Wrap<torch::nn::Linear>(7, 3));
  }
  at::Tensor forward(const at::Tensor& x, int expert) {
    const at::Tensor y = before(x);
    return after(y + experts->ptr<ExpertImpl>(static_cast<std::size_t>(expert))->forward(y));
  }
  torch::nn::Linear before{nullptr};
  torch::nn::ModuleList experts{nullptr};
  Wrap<torch::nn::Linear> after{nullptr};
};
TORCH_MODULE(Mixture);

Mixture make_mixture(const std::vector<int>& experts) {
  Mixture model(experts);
  model->to(at::kDouble);
  const at::NoGradGuard no_grad;
  for (const auto& param : model->named_parameters()) {  // by its name: ranks have different parameters
    const auto phase = static_cast<double>(param.key().size() + static_cast<std::size_t>(param.key()[8]));
    const at::Tensor values = at::arange(param.value().numel(), at::kDouble).add(phase).mul(0.7).sin().mul(0.4);
    param.value().detach().copy_(values.reshape(param.value().sizes()));
  }
  return model;
}

// The group of the ranks that have the same expert.
ProcessGroup expert_group(const ProcessGroup& group) {
  ProcessGroup found;
  for (int expert = 0; expert < kExperts; ++expert) {
    std::vector<int> ranks;
    for (int rank = expert; rank < group.size(); rank += kExperts) ranks.push_back(rank);
    if (const auto made = group.subgroup(ranks)) found = *made;
  }
  return found;
}

WrapPolicy experts_in(const std::optional<ProcessGroup>& group, std::optional<ShardingStrategy> strategy = {}) {
  return [=](const torch::nn::Module& module, std::int64_t) -> UnitChoice {
    if (module.as<ExpertImpl>() != nullptr) return UnitOptions{.strategy = strategy, .group = group};
    return dynamic_cast<const Wrappable*>(&module) != nullptr;
  };
}

Options with_policy(Options options, WrapPolicy policy) {
  options.policy = std::move(policy);
  return options;
}

struct MixtureTraining {
  MixtureTraining(const std::vector<int>& experts, const ProcessGroup& group, const Options& options)
      : model(make_mixture(experts), group, options) {
    optimizer = std::make_unique<torch::optim::AdamW>(model.parameters(), torch::optim::AdamWOptions(0.02));
  }
  // Returns the loss and the norm of the gradients.
  std::pair<double, double> step(int step) {
    const double loss = backward_of_batches(
        model, kBatches, [&](int batch) { return loss_of(model(batch_of(step, batch), batch % kExperts)); });
    if (model.group().size() == 1) {  // ranks average the gradients of an expert over those that have it
      for (const at::Tensor& param : model->experts->parameters()) param.mutable_grad().mul_(kExperts);
    }
    const auto norm = model.clip_grad_norm_(0.1).item<double>();
    optimizer->step();
    return {loss, norm};
  }
  StateDict state(StateDictType type = StateDictType::sharded, const FullStateOptions& full = {.rank0_only = false}) {
    return {{"model", model.state_dict(type, full)}, {"optim", model.optim_state_dict(*optimizer, type, full)}};
  }
  void load_state(const StateDict& state, const FullStateOptions& full = {.rank0_only = false}) {
    model.load_state_dict(state.at("model").get<Dict>(), full);
    model.load_optim_state_dict(*optimizer, state.at("optim").get<Dict>(), full);
  }

  FullyShardedDataParallel<Mixture> model;
  std::unique_ptr<torch::optim::AdamW> optimizer;
};

class OwnGroupsTest : public ::testing::TestWithParam<std::tuple<int, bool, ShardingStrategy>> {};

TEST_P(OwnGroupsTest, ExpertsTrainAsInOneProcess) {
  const int ranks = std::get<0>(GetParam());
  const bool use_orig_params = std::get<1>(GetParam());
  const ShardingStrategy strategy = std::get<2>(GetParam());
  std::vector<std::pair<double, double>> expected;
  std::map<std::string, at::Tensor> params;  // after the last step
  {
    MixtureTraining alone({0, 1}, {}, {});
    for (int step = 0; step < 4; ++step) expected.push_back(alone.step(step));
    for (const auto& param : alone.model->named_parameters()) params[param.key()] = param.value().detach().clone();
  }
  const auto expect_step = [&](MixtureTraining& training, std::size_t step) {
    const auto [loss, norm] = training.step(static_cast<int>(step));
    EXPECT_NEAR(loss, expected[step].first, 1e-10) << step;
    EXPECT_NEAR(norm, expected[step].second, 1e-10) << step;
  };
  const TemporaryDirectory directory;
  run_local(ranks, [&](const ProcessGroup& group) {
    const std::vector<int> own = {group.rank() % kExperts};
    const Options options = with_policy(options_of(ShardingStrategy::full_shard, use_orig_params),
                                        experts_in(expert_group(group), strategy));
    MixtureTraining first(own, group, options);
    for (const std::size_t step : {0, 1}) expect_step(first, step);
    save(first.state(), directory.path(), group);
    MixtureTraining from_file(own, group, options), from_full(own, group, options);
    StateDict state = from_file.state();
    load(state, directory.path(), group);
    from_file.load_state(state);
    from_full.load_state(first.state(StateDictType::full));
    for (MixtureTraining* training : {&first, &from_file, &from_full}) {
      for (const std::size_t step : {2, 3}) expect_step(*training, step);
    }
    const StateDict full = first.model.state_dict(StateDictType::full, {.rank0_only = false});
    EXPECT_EQ(full.size(), 6u);
    for (const auto& [key, value] : full) {
      const auto& name = std::get<std::string>(key);
      EXPECT_TRUE(at::allclose(value.get<at::Tensor>(), params.at(name), 1e-9, 1e-12)) << name;
    }
    first.model.summon_full_params([&] {
      for (const auto& param : first.model->named_parameters()) {
        EXPECT_TRUE(at::allclose(param.value(), params.at(param.key()), 1e-9, 1e-12)) << param.key();
      }
    });
  });
  MixtureTraining alone({0, 1}, {}, {});  // loads the experts of all ranks
  StateDict state = alone.state();
  load(state, directory.path());
  alone.load_state(state);
  const StateDict full = alone.state(StateDictType::full);
  for (const std::size_t step : {2, 3}) expect_step(alone, step);
  run_local(ranks, [&](const ProcessGroup& group) {  // which load theirs from the state of one process
    MixtureTraining some({group.rank() % kExperts}, group,
                         with_policy(options_of(ShardingStrategy::full_shard, use_orig_params),
                                     experts_in(expert_group(group), strategy)));
    const StateDict empty{{"model", Dict()}, {"optim", Dict()}};
    some.load_state(group.rank() == 0 ? full : empty, {.rank0_only = true});
    for (const std::size_t step : {2, 3}) expect_step(some, step);
  });
}

INSTANTIATE_TEST_SUITE_P(Worlds, OwnGroupsTest,
                         ::testing::Combine(::testing::Values(2, 4), ::testing::Bool(),
                                            ::testing::Values(ShardingStrategy::full_shard,
                                                              ShardingStrategy::no_shard)));

TEST(OwnGroupsOfRanksTest, OneRankDoesNotHaveAllParameters) {
  run_local(2, [](const ProcessGroup& group) {
    MixtureTraining some({group.rank()}, group, with_policy({}, experts_in(ProcessGroup())));
    some.step(0);
    EXPECT_ERROR(some.model.state_dict(StateDictType::full), ErrorCode::unsupported, "rank0_only is true");
    EXPECT_ERROR(some.model.optim_state_dict(*some.optimizer, StateDictType::full), ErrorCode::unsupported,
                 "rank0_only is true");
    some.step(1);
  });
}

TEST(OwnGroupsOfRanksTest, EachRankOfAGroupCallsItsUnits) {
  run_local(4, [](const ProcessGroup& group) {
    FullyShardedDataParallel<Mixture> model(make_mixture({group.rank() % kExperts}), group,
                                            with_policy({}, experts_in(expert_group(group))));
    const int expert = group.rank() % kExperts;
    loss_of(model(batch_of(0, group.rank()), expert)).backward();
    const SummonOptions own{.module = model->experts[static_cast<std::size_t>(expert)].get()};
    const SummonOptions different{.module = group.rank() == 2 ? &*model->after : own.module};
    EXPECT_ERROR(model.summon_full_params([] {}, different), ErrorCode::invalid_argument, "summon_full_params");
    model.summon_full_params([&] { EXPECT_EQ(model->experts->parameters()[0].dim(), 2); }, own);
  });
}

// Each is refused on all ranks.
TEST(OwnGroupsOfRanksTest, WhatDoesNotFitIsRefused) {
  run_local(4, [](const ProcessGroup& group) {
    const ProcessGroup own = expert_group(group);
    const int expert = group.rank() % kExperts;
    const auto shard = [&](const std::vector<int>& experts, WrapPolicy policy, const Options& options = {},
                           const std::optional<ProcessGroup>& all = {}) {
      const FullyShardedDataParallel<Mixture> model(make_mixture(experts), all.value_or(group),
                                                    with_policy(options, std::move(policy)));
    };
    EXPECT_ERROR(shard({0}, experts_in(own)), ErrorCode::invalid_argument,
                 "'experts.0.layer.weight' is sharded over ranks 0, 2 on rank 0 and over ranks 1, 3 on rank 1");
    EXPECT_ERROR(
        shard({expert}, experts_in(group.rank() == 2 ? std::nullopt : std::optional(own))), ErrorCode::invalid_argument,
        "'experts.0.layer.bias' has a group of ranks 0, 2 in its unit's options on ranks 0, expected it on all");
    const HybridGroups hybrid = hybrid_groups(group, 2);
    Options replicated = options_of(ShardingStrategy::hybrid_shard, true);
    replicated.replicas = hybrid.replicas;
    EXPECT_ERROR(shard({expert}, experts_in(own), replicated, hybrid.shards), ErrorCode::unsupported,
                 "has a group and strategy hybrid_shard");
    EXPECT_ERROR(shard({expert}, experts_in(group), {}, own), ErrorCode::invalid_argument,
                 "has the ranks 0, 1, 2, 3 and that of the model");
    Mixture on_meta = make_mixture({expert});
    if (expert == 1) {
      const MetaInit without_memory;
      on_meta->experts = on_meta->replace_module("experts", Mixture(std::vector<int>{expert})->experts);
      on_meta->experts[1]->register_parameter("own", at::ones({2}));  // that nothing initializes
      on_meta->experts->to(at::kDouble);
    }
    EXPECT_ERROR((FullyShardedDataParallel<Mixture>(on_meta, group, with_policy({}, experts_in(own)))),
                 ErrorCode::invalid_argument, "is on meta, expected Options::param_init_fn");
  });
}

}  // namespace
}  // namespace tessera::fsdp
