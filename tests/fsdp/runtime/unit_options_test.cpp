// Units with options of their own, which a policy states.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>

#include <map>
#include <memory>
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
#include "tessera/state/save.h"

namespace tessera::fsdp {
namespace {

using ::testing::ElementsAre;
using testing::TemporaryDirectory;

// Selects the modules of `model` with these names.
WrapPolicy by_name(const torch::nn::Module& model, const std::map<std::string, UnitOptions>& options) {
  std::map<const torch::nn::Module*, UnitOptions> by_module;
  for (const auto& named : model.named_modules()) {
    if (const auto found = options.find(named.key()); found != options.end()) {
      by_module[named.value().get()] = found->second;
    }
  }
  return [by_module](const torch::nn::Module& module, std::int64_t) -> UnitChoice {
    const auto found = by_module.find(&module);
    if (found == by_module.end()) return false;
    return found->second;
  };
}

UnitOptions with_strategy(ShardingStrategy strategy) { return {.strategy = strategy}; }

const std::map<std::string, UnitOptions> kMixedStrategies = {
    {"first", with_strategy(ShardingStrategy::no_shard)},
    {"twice", with_strategy(ShardingStrategy::shard_grad_op)},
    {"inner", {.offload_params = true}},
    {"never", with_strategy(ShardingStrategy::no_shard)},
    {"head", with_strategy(ShardingStrategy::full_shard)},
};

struct Training {
  Training(const ProcessGroup& group, Options options, const std::map<std::string, UnitOptions>& units)
      : Training(make_model(), group, std::move(options), units) {}
  Training(SmallModel plain, const ProcessGroup& group, Options options,
           const std::map<std::string, UnitOptions>& units)
      : model(plain, group, [&] {
          options.policy = by_name(*plain, units);
          return options;
        }()) {
    optimizer = std::make_unique<torch::optim::AdamW>(model.parameters(), torch::optim::AdamWOptions(0.02));
  }
  double step(int step) {
    const double loss =
        backward_of_batches(model, kBatches, [&](int batch) { return loss_of(model(batch_of(step, batch))); });
    norms.push_back(model.clip_grad_norm_(0.1).item<double>());
    optimizer->step();
    return loss;
  }
  StateDict state(StateDictType type = StateDictType::sharded, const FullStateOptions& full = {}) {
    return {{"model", model.state_dict(type, full)}, {"optim", model.optim_state_dict(*optimizer, type, full)}};
  }
  void load_state(const StateDict& state, const FullStateOptions& full = {.rank0_only = false}) {
    model.load_state_dict(state.at("model").get<Dict>(), full);
    model.load_optim_state_dict(*optimizer, state.at("optim").get<Dict>(), full);
  }

  FullyShardedDataParallel<SmallModel> model;
  std::unique_ptr<torch::optim::AdamW> optimizer;
  std::vector<double> norms;
};

class UnitOptionsTest : public ::testing::TestWithParam<std::tuple<int, bool, ShardingStrategy>> {
 protected:
  int ranks() const { return std::get<0>(GetParam()); }
  Options options() const { return options_of(std::get<2>(GetParam()), std::get<1>(GetParam())); }
};

TEST_P(UnitOptionsTest, UnitsOfDifferentStrategiesTrainAsOneProcessDoes) {
  std::vector<double> losses, norms;
  {
    Training alone({}, {}, {});
    for (int step = 0; step < 4; ++step) losses.push_back(alone.step(step));
    norms = alone.norms;
  }
  const TemporaryDirectory directory;
  run_local(ranks(), [&](const ProcessGroup& group) {
    Training some(group, options(), kMixedStrategies);
    for (std::size_t step = 0; step < 2; ++step) {
      EXPECT_NEAR(some.step(static_cast<int>(step)), losses[step], 1e-10);
      EXPECT_NEAR(some.norms[step], norms[step], 1e-10);
    }
    save(some.state(), directory.path(), group);
    const StateDict full = some.state(StateDictType::full), local = some.model.state_dict(StateDictType::local);

    Training from_file(group, options(), {});
    StateDict state = from_file.state();
    load(state, directory.path(), group);
    from_file.load_state(state);
    Training from_full(group, options(), kMixedStrategies);
    from_full.load_state(full, {.rank0_only = true});
    Training from_local(group, options(), kMixedStrategies);
    from_local.load_state({{"model", local}, {"optim", some.state().at("optim")}});
    for (std::size_t step = 2; step < 4; ++step) {
      for (Training* training : {&some, &from_file, &from_full, &from_local}) {
        EXPECT_NEAR(training->step(static_cast<int>(step)), losses[step], 1e-10);
      }
    }
  });
}

std::string name_of_options(const ::testing::TestParamInfo<std::tuple<int, bool, ShardingStrategy>>& info) {
  const auto [ranks, use_orig_params, strategy] = info.param;
  return std::to_string(ranks) + (use_orig_params ? "OrigParams" : "FlatParams") +
         (strategy == ShardingStrategy::no_shard ? "NoShard" : "FullShard");
}
INSTANTIATE_TEST_SUITE_P(Worlds, UnitOptionsTest,
                         ::testing::Combine(::testing::Values(1, 3), ::testing::Bool(),
                                            ::testing::Values(ShardingStrategy::full_shard,
                                                              ShardingStrategy::no_shard)),
                         name_of_options);

TEST(UnitOptionsOfStrategyTest, AUnitIsReshardedAfterForwardByItsOwnStrategy) {
  run_local(2, [](const ProcessGroup& group) {
    Training training(group, {}, kMixedStrategies);
    const at::Tensor loss = loss_of(training.model(batch_of(0, group.rank())));
    std::map<std::string, bool> is_gathered;
    for (std::size_t i = 0; i < training.model.unit_count(); ++i) {
      is_gathered[training.model.unit_name(i)] = training.model.handle(i).is_gathered();
    }
    EXPECT_TRUE(is_gathered.at("twice"));
    EXPECT_FALSE(is_gathered.at("inner"));
    loss.backward();
    EXPECT_FALSE(training.model.handle(2).is_gathered());
    EXPECT_EQ(training.model->inner->weight.dim(), 1);
    EXPECT_EQ(training.model->first->up->weight.dim(), 2);  // no_shard
  });
}

// Keeps the dtypes of its last call.
struct ProbeImpl : torch::nn::Module {
  explicit ProbeImpl(std::int64_t width = 4) {
    weight = register_parameter("weight", at::eye(width));
    buffer = register_buffer("buffer", at::ones({width}));
  }
  at::Tensor forward(const at::Tensor& x) {
    dtypes = {x.scalar_type(), weight.scalar_type(), buffer.scalar_type()};
    return at::matmul(x.to(weight.scalar_type()), weight);
  }
  at::Tensor weight, buffer;
  std::vector<at::ScalarType> dtypes;
};
TORCH_MODULE(Probe);

TEST(UnitOptionsOfPrecisionTest, EachUnitComputesInItsOwnDtype) {
  run_local(2, [](const ProcessGroup& group) {
    for (const auto& [by_model, casts_inputs] : {std::pair(true, true), {false, true}, {false, false}}) {
      torch::nn::Sequential plain{Wrap<Probe>(), Wrap<Probe>(), Wrap<Probe>()};
      MixedPrecision low;
      low.param_dtype = at::kBFloat16;
      low.buffer_dtype = at::kHalf;
      low.cast_forward_inputs = casts_inputs;
      low.cast_root_forward_inputs = false;
      Options options;
      if (by_model) options.mixed_precision = low;
      const std::map<std::string, UnitOptions> units = {
          {"0", {.mixed_precision = MixedPrecision()}}, {"1", {.mixed_precision = low}}, {"2", UnitOptions()}};
      options.policy = by_name(*plain, units);
      FullyShardedDataParallel<torch::nn::Sequential> model(plain, group, options);
      model(at::ones({2, 4})).sum().backward();
      const auto dtypes = [&](std::size_t i) { return dynamic_cast<const ProbeImpl&>(*plain[i]).dtypes; };
      EXPECT_THAT(dtypes(0), ElementsAre(at::kFloat, at::kFloat, at::kFloat));
      EXPECT_THAT(dtypes(1), ElementsAre(casts_inputs ? at::kBFloat16 : at::kFloat, at::kBFloat16, at::kHalf));
      if (by_model) {
        EXPECT_THAT(dtypes(2), ElementsAre(at::kBFloat16, at::kBFloat16, at::kHalf));
      } else {
        EXPECT_THAT(dtypes(2), ElementsAre(at::kBFloat16, at::kFloat, at::kFloat));
      }
      const auto& second = dynamic_cast<const ProbeImpl&>(*plain[1]);
      EXPECT_EQ(second.weight.grad().scalar_type(), at::kFloat);
      model.state_dict();
      EXPECT_EQ(second.buffer.scalar_type(), at::kFloat);
    }
  });
}

TEST(UnitOptionsOfPrecisionTest, ABatchNormHasThePrecisionThatThePolicyStates) {
  MixedPrecision low;
  low.param_dtype = at::kBFloat16;
  torch::nn::Sequential plain{torch::nn::BatchNorm1d(4), torch::nn::BatchNorm1d(4)};
  Options options;
  options.mixed_precision = low;
  options.policy = by_name(*plain, {{"0", {.mixed_precision = low}}});
  const FullyShardedDataParallel<torch::nn::Sequential> model(plain, {}, options);
  ASSERT_EQ(model.unit_count(), 2u);
  EXPECT_EQ(model.handle(0).options().mixed_precision.param_dtype, at::kBFloat16);
  EXPECT_EQ(model.handle(1).options().mixed_precision.param_dtype, std::nullopt);
}

struct NormedImpl : torch::nn::Module {
  NormedImpl() {
    linear = register_module("linear", torch::nn::Linear(4, 4));
    norm = register_module("norm", torch::nn::BatchNorm1d(4));
  }
  at::Tensor forward(const at::Tensor& x) { return norm(linear(x)); }
  torch::nn::Linear linear{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
};
TORCH_MODULE(Normed);

TEST(UnitOptionsRefusalTest, OptionsThatContradictThoseOfTheModel) {
  const auto shard = [](const UnitOptions& unit) {
    torch::nn::Sequential plain{torch::nn::Linear(4, 4), Normed()};
    Options options;
    options.policy = by_name(*plain, {{"1", unit}});
    const FullyShardedDataParallel<torch::nn::Sequential> model(plain, {}, options);
  };
  EXPECT_ERROR(shard(with_strategy(ShardingStrategy::hybrid_shard)), ErrorCode::invalid_argument,
               "the strategy of unit '1' is hybrid_shard and that of the model full_shard");
  MixedPrecision low;
  low.param_dtype = at::kBFloat16;
  EXPECT_ERROR(shard({.mixed_precision = low}), ErrorCode::invalid_argument,
               "unit '1' has mixed precision and contains a torch::nn::BatchNorm1dImpl");
}

TEST(UnitOptionsRefusalTest, RanksWithOtherOptionsOfAUnitAllThrow) {
  run_local(2, [](const ProcessGroup& group) {
    const SmallModel plain = make_model();
    Options options;
    options.policy = by_name(*plain, {{"inner", {.offload_params = group.rank() == 1}}});
    EXPECT_ERROR(FullyShardedDataParallel<SmallModel>(plain, group, options), ErrorCode::invalid_argument,
                 "rank 0 has offload_params false and rank 1 has offload_params true");
  });
}

}  // namespace
}  // namespace tessera::fsdp
