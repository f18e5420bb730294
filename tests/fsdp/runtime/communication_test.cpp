// What forward and backward communicate, by strategy, and when.

#include "tessera/comm/comm_debug_mode.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/utils/clip_grad.h>

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "fsdp/grads.h"
#include "fsdp/small_model.h"
#include "support/error_matchers.h"
#include "tessera/comm/local_ranks.h"
#include "tessera/state/module_state.h"

namespace tessera::fsdp {
namespace {

using ::testing::ElementsAre;
using Counts = std::map<std::string, std::int64_t>;

constexpr std::int64_t kUnits = 4;

// Units that are called one after another, and nothing else.
torch::nn::Sequential make_chain() {
  torch::nn::Sequential chain;
  for (int i = 0; i < kUnits; ++i) chain->push_back(Wrap<torch::nn::Linear>(5, 5));
  fill(*chain);
  return chain;
}

// Returns the collectives of a step after the first, in which ranks also compare the order of units.
Counts collectives_of_step(FullyShardedDataParallel<torch::nn::Sequential>& model, const ProcessGroup& world,
                           bool syncs) {
  Counts counts;
  for (int step = 0; step < 2; ++step) {
    const CommDebugMode mode(world);
    const auto no_sync = model.no_sync(/*off=*/syncs);
    loss_of(model(batch_of(step, world.rank()))).backward();
    counts = mode.counts();
  }
  return counts;
}

// Backward does not gather the unit that was called last, which forward leaves gathered.
TEST(CommunicationTest, AStepGathersAndReducesEachUnitAsItsStrategyStates) {
  run_local(2, [](const ProcessGroup& group) {
    for (const bool use_orig_params : {true, false}) {
      const auto counts = [&](ShardingStrategy strategy, bool syncs) {
        FullyShardedDataParallel<torch::nn::Sequential> model(make_chain(), group,
                                                              options_of(strategy, use_orig_params));
        return collectives_of_step(model, group, syncs);
      };
      EXPECT_EQ(counts(ShardingStrategy::full_shard, true),
                (Counts{{"all_gather_into", 2 * kUnits - 1}, {"reduce_scatter_into", kUnits}}));
      EXPECT_EQ(counts(ShardingStrategy::full_shard, false), (Counts{{"all_gather_into", 2 * kUnits - 1}}));
      EXPECT_EQ(counts(ShardingStrategy::shard_grad_op, true),
                (Counts{{"all_gather_into", kUnits}, {"reduce_scatter_into", kUnits}}));
      EXPECT_EQ(counts(ShardingStrategy::shard_grad_op, false).count("reduce_scatter_into"), 0u);
      EXPECT_EQ(counts(ShardingStrategy::no_shard, true), (Counts{{"all_reduce", kUnits}}));
      EXPECT_EQ(counts(ShardingStrategy::no_shard, false), Counts());
    }
  });
}

TEST(CommunicationTest, HybridUnitsMayBeOfBothStrategies) {
  torch::nn::Sequential alone = make_chain();
  backward_of_all(alone, {0}, 4);
  run_local(4, [&](const ProcessGroup& group) {
    const HybridGroups groups = hybrid_groups(group, 2);
    const auto shard = [&](ShardingStrategy of_model, ShardingStrategy of_first) {
      Options options = options_of(of_model, true);
      options.replicas = groups.replicas;
      const torch::nn::Sequential plain = make_chain();
      options.policy = [first = plain->ptr(0), of_first](const torch::nn::Module& module, std::int64_t) -> UnitChoice {
        if (&module != first.get()) return module.as<torch::nn::LinearImpl>() != nullptr;
        return UnitOptions{.strategy = of_first};
      };
      return FullyShardedDataParallel<torch::nn::Sequential>(plain, groups.shards, options);
    };
    const auto expected = [](std::int64_t gathers) {
      return Counts{{"all_gather_into", gathers}, {"reduce_scatter_into", kUnits}, {"all_reduce", kUnits}};
    };
    const auto full = ShardingStrategy::hybrid_shard, zero2 = ShardingStrategy::hybrid_shard_zero2;
    for (const auto& [of_model, of_first, gathers] :
         {std::tuple(full, full, 2 * kUnits - 1), {zero2, zero2, kUnits}, {full, zero2, 2 * kUnits - 2}}) {
      auto model = shard(of_model, of_first);
      EXPECT_EQ(collectives_of_step(model, group, true), expected(gathers));
      model.zero_grad();
      loss_of(model(batch_of(0, group.rank()))).backward();
      expect_same_grads(unsharded_grads(model), *alone);
    }
  });
}

// PyTorch: test_fsdp_hybrid_shard_basic_setup with MIXED_HYBRID_FULL_SHARD.
TEST(CommunicationTest, UnitsOfAHybridModelMayBeShardedOverAllRanks) {
  torch::nn::Sequential alone = make_chain();
  const StateDict before = get_model_state_dict(*alone);
  backward_of_all(alone, {0}, 4);
  const double norm = torch::nn::utils::clip_grad_norm_(alone->parameters(), 0.1);
  run_local(4, [&](const ProcessGroup& group) {
    const HybridGroups groups = hybrid_groups(group, 2);
    const auto shard = [&](const UnitOptions& of_first) {
      Options options = options_of(ShardingStrategy::hybrid_shard, true);
      options.replicas = groups.replicas;
      const torch::nn::Sequential plain = make_chain();
      options.policy = [first = plain->ptr(0), of_first](const torch::nn::Module& module, std::int64_t) -> UnitChoice {
        if (&module != first.get()) return module.as<torch::nn::LinearImpl>() != nullptr;
        return of_first;
      };
      return FullyShardedDataParallel<torch::nn::Sequential>(plain, groups.shards, options);
    };
    for (const auto& [strategy, counts] :
         {std::pair(
              ShardingStrategy::full_shard,
              Counts{{"all_gather_into", 2 * kUnits - 1}, {"reduce_scatter_into", kUnits}, {"all_reduce", kUnits - 1}}),
          {ShardingStrategy::no_shard,
           Counts{{"all_gather_into", 2 * kUnits - 3}, {"reduce_scatter_into", kUnits - 1}, {"all_reduce", kUnits}}}}) {
      auto model = shard({.strategy = strategy, .group = group});
      EXPECT_EQ(collectives_of_step(model, group, true), counts);
      model.zero_grad();
      const StateDict full = model.state_dict(StateDictType::full);  // each copy's rank 0 has all parameters
      EXPECT_EQ(full, groups.shards.rank() == 0 ? before : StateDict());
      loss_of(model(batch_of(0, group.rank()))).backward();
      EXPECT_NEAR(model.clip_grad_norm_(0.1).item<double>(), norm, 1e-12);
      expect_same_grads(unsharded_grads(model), *alone);
      auto other = shard({.strategy = strategy, .group = group});
      other.apply([](torch::nn::Module& module) {
        for (const at::Tensor& param : module.parameters(/*recurse=*/false)) param.zero_();
      });
      other.load_state_dict(model.state_dict());
      EXPECT_EQ(other.state_dict(StateDictType::full), full);
    }
    const auto full_shard = ShardingStrategy::full_shard;
    EXPECT_ERROR(shard({.strategy = full_shard}), ErrorCode::invalid_argument,
                 "expected a hybrid strategy for both, or for none, or for the model and UnitOptions::group");
    EXPECT_ERROR(shard({.strategy = full_shard, .group = groups.shards}), ErrorCode::invalid_argument,
                 "expected a group of all 4 ranks");
  });
}

// Tells when backward reaches its result, and when it computes its gradient.
struct PeekImpl : torch::nn::Module {
  PeekImpl(std::function<void()> reached_in, std::function<void()> computes_in)
      : reached(std::move(reached_in)), computes(std::move(computes_in)) {
    linear = register_module("linear", torch::nn::Linear(5, 5));
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor inner = linear(x), result = at::tanh(inner);
    if (inner.requires_grad()) {
      result.register_hook([this](const at::Tensor&) { reached(); });  // before the unit is unsharded
      inner.register_hook([this](const at::Tensor&) { computes(); });
    }
    return result;
  }
  std::function<void()> reached, computes;
  torch::nn::Linear linear{nullptr};
};
TORCH_MODULE(Peek);

// The units that are gathered when backward reaches a unit's result, and when it computes its gradient.
using Gathered = std::pair<std::vector<std::size_t>, std::vector<std::size_t>>;

// Returns them by unit, in the order of backward, for a chain whose first `frozen` units need no gradient.
std::vector<Gathered> gathered_in_backward(const ProcessGroup& group, BackwardPrefetch prefetch,
                                           const std::vector<std::size_t>& frozen, bool input_needs_gradient) {
  const ShardedModule* sharded = nullptr;
  std::vector<Gathered> found;
  const auto gathered = [&] {
    std::vector<std::size_t> units;
    for (std::size_t i = 0; i < sharded->unit_count(); ++i) {
      if (sharded->handle(i).is_gathered()) units.push_back(i);
    }
    return units;
  };
  torch::nn::Sequential plain;
  for (int i = 0; i < kUnits; ++i) {
    plain->push_back(Wrap<Peek>(std::function<void()>([&] {
                                  found.push_back({gathered(), {}});
                                }),
                                std::function<void()>([&] { found.back().second = gathered(); })));
  }
  for (const std::size_t i : frozen) {
    for (const at::Tensor& param : plain[i]->parameters()) param.set_requires_grad(false);
  }
  Options options;
  options.backward_prefetch = prefetch;
  options.forward_prefetch = false;
  FullyShardedDataParallel<torch::nn::Sequential> model(plain, group, options);
  sharded = &model;
  model(at::ones({2, 5}).set_requires_grad(input_needs_gradient)).sum().backward();
  for (std::size_t i = 0; i < model.unit_count(); ++i) EXPECT_FALSE(model.handle(i).is_gathered());
  return found;
}

Gathered gathers(std::vector<std::size_t> reached, std::vector<std::size_t> computes) {
  return {std::move(reached), std::move(computes)};
}

// A unit is freed when backward has reached the next one.
TEST(CommunicationTest, BackwardGathersTheNextUnitBeforeAGradientAfterItOrWhenItIsReached) {
  run_local(2, [](const ProcessGroup& group) {
    const auto of = [&](BackwardPrefetch prefetch) { return gathered_in_backward(group, prefetch, {}, false); };
    EXPECT_THAT(of(BackwardPrefetch::none),
                ElementsAre(gathers({}, {3}), gathers({3}, {2}), gathers({2}, {1}), gathers({1}, {0})));
    EXPECT_THAT(of(BackwardPrefetch::pre), ElementsAre(gathers({}, {2, 3}), gathers({2, 3}, {1, 2}),
                                                       gathers({1, 2}, {0, 1}), gathers({0, 1}, {0})));
    // Nothing is computed between these units.
    EXPECT_EQ(of(BackwardPrefetch::post), of(BackwardPrefetch::none));
  });
}

TEST(CommunicationTest, FrozenUnitsAreFreedInBackwardAndNotGatheredWhereItDoesNotReachThem) {
  run_local(2, [](const ProcessGroup& group) {
    for (const bool input_needs_gradient : {false, true}) {
      EXPECT_THAT(
          gathered_in_backward(group, BackwardPrefetch::pre, {1, 2}, input_needs_gradient),
          ElementsAre(gathers({}, {2, 3}), gathers({2, 3}, {1, 2}), gathers({1, 2}, {0, 1}), gathers({0, 1}, {0})));
    }
    EXPECT_THAT(gathered_in_backward(group, BackwardPrefetch::pre, {0, 1}, false),
                ElementsAre(gathers({}, {2, 3}), gathers({2, 3}, {2})));
  });
}

}  // namespace
}  // namespace tessera::fsdp
