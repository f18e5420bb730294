// Features of a sharded model besides plain training: ignored modules, nested and reused units, misuse.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/optim/adamw.h>

#include <algorithm>
#include <cstdlib>
#include <functional>

#include "fsdp/grads.h"
#include "fsdp/small_model.h"
#include "support/error_matchers.h"
#include "support/temporary_directory.h"
#include "tessera/comm/local_ranks.h"
#include "tessera/state/load.h"
#include "tessera/state/optimizer_state.h"
#include "tessera/state/save.h"

namespace tessera::fsdp {
namespace {

using ::testing::ElementsAre;
using testing::TemporaryDirectory;

std::vector<std::string> unit_names(const ShardedModule& model) {
  std::vector<std::string> names;
  for (std::size_t i = 0; i < model.unit_count(); ++i) names.push_back(model.unit_name(i));
  return names;
}

TEST(FsdpTest, EveryWrappedModuleIsAUnitUnlessAPolicySaysOtherwise) {
  const auto names_with = [](const WrapPolicy& policy) {
    Options options;
    options.policy = policy;
    return unit_names(FullyShardedDataParallel<SmallModel>(make_model(), {}, options));
  };
  EXPECT_THAT(names_with(nullptr), ElementsAre("", "first", "twice", "inner", "never", "head"));
  EXPECT_THAT(names_with(wrap_none()), ElementsAre(""));
  EXPECT_THAT(names_with(wrap_modules<BlockImpl>()), ElementsAre("", "first", "twice", "never"));
  EXPECT_THAT(names_with(wrap_larger_than(40)),
              ElementsAre("", "first.up", "first.down", "twice.up", "twice.down", "inner", "never.up", "never.down"));
}

// Nested units: each parameter belongs to the innermost.
struct AroundBlockImpl : torch::nn::Module {
  AroundBlockImpl() {
    in = register_module("in", Wrap<Block>(5));
    own = register_module("own", torch::nn::Linear(5, 5));
  }
  at::Tensor forward(at::Tensor x) { return own(in(x)); }
  Wrap<Block> in{nullptr};
  torch::nn::Linear own{nullptr};
};
TORCH_MODULE(AroundBlock);

TEST(FsdpTest, UnitsWithinUnitsInASequential) {
  const auto make = [] {
    torch::nn::Sequential model{Wrap<AroundBlock>(), torch::nn::Tanh(), Wrap<AroundBlock>(),
                                Wrap<torch::nn::Linear>(5, 2)};
    fill(*model);
    return model;
  };
  torch::nn::Sequential alone = make();
  backward_of_all(alone, {0}, 3);
  run_local(3, [&](const ProcessGroup& group) {
    FullyShardedDataParallel<torch::nn::Sequential> model(make(), group);
    EXPECT_THAT(unit_names(model), ElementsAre("0.in", "0", "2.in", "2", "3"));
    for (int times = 0; times < 2; ++times) {
      model.zero_grad();
      loss_of(model(batch_of(0, group.rank()))).backward();
      expect_same_grads(unsharded_grads(model), *alone);
    }
  });
}

TEST(FsdpTest, AModelThatIsWrappedItself) {
  const auto make = [] {
    Wrap<Block> model(5);
    fill(*model);
    return model;
  };
  Wrap<Block> alone = make();
  backward_of_all(alone, {0}, 2);
  run_local(2, [&](const ProcessGroup& group) {
    FullyShardedDataParallel<Wrap<Block>> model(make(), group);
    EXPECT_THAT(unit_names(model), ElementsAre(""));
    for (const bool by_module : {false, true}) {
      model.zero_grad();
      const at::Tensor batch = batch_of(0, group.rank());
      loss_of(by_module ? model->forward(batch) : model(batch)).backward();
      expect_same_grads(unsharded_grads(model), *alone);
    }
    EXPECT_ERROR(FullyShardedDataParallel<Wrap<Block>>(model.module(), group), ErrorCode::invalid_argument,
                 "is sharded already");
  });
}

TEST(FsdpTest, GradientsThatWereNotReducedArentPutTogether) {
  run_local(2, [&](const ProcessGroup& group) {
    FullyShardedDataParallel<SmallModel> model(make_model(), group);
    {
      const auto no_sync = model.no_sync();
      loss_of(model(batch_of(0, 0))).backward();
    }
    EXPECT_ERROR(unsharded_grads(model), ErrorCode::invalid_argument, "was not reduced");
    EXPECT_EQ(model->inner->weight.dim(), 1);  // the model is unchanged
    EXPECT_FALSE(model.handle(0).is_gathered());
    loss_of(model(batch_of(0, 0))).backward();
    EXPECT_TRUE(unsharded_grads(model)[0].defined());
  });
}

TEST(FsdpTest, OptionsThatCantBeAreRefused) {
  Options options;
  options.max_prefetched_units = -1;
  EXPECT_ERROR(FullyShardedDataParallel<SmallModel>(make_model(), {}, options), ErrorCode::invalid_argument,
               "max_prefetched_units is -1");
  EXPECT_ERROR(FullyShardedDataParallel<SmallModelImpl>(nullptr), ErrorCode::invalid_argument, "the module is null");
}

TEST(FsdpTest, AUnitThatDoesNotExistIsRefused) {
  FullyShardedDataParallel<SmallModel> model(make_model());
  const std::size_t count = model.unit_count();
  EXPECT_ERROR(model.handle(count), ErrorCode::invalid_argument,
               fmt::format("handle: unit {}, expected less than", count));
  EXPECT_ERROR(model.unit_name(count), ErrorCode::invalid_argument,
               fmt::format("less than {}, the number of units", count));
}

TEST(FsdpTest, TheModelIsCalledByForwardAlone) {
  run_local(2, [&](const ProcessGroup& group) {
    FullyShardedDataParallel<SmallModel> model(make_model(), group);
    EXPECT_ERROR(model->first->forward(at::ones({2, 7}, at::kDouble)), ErrorCode::invalid_argument,
                 "'first' was called while its parameters are sharded",
                 "expected a call of the FullyShardedDataParallel");
    model.summon_full_params([&] {});
  });
}

// A module, a parameter of the model itself, and one of a unit.
TEST(FsdpTest, WhatIsIgnoredStaysAsItIs) {
  run_local(2, [&](const ProcessGroup& group) {
    for (Options options : kWays) {
      SmallModel plain = make_model();
      options.ignored_modules = {plain->first.ptr()};
      options.ignored_parameters = {plain->scale, plain->twice->up->bias};
      FullyShardedDataParallel<SmallModel> model(plain, group, options);
      EXPECT_EQ(model->first->up->weight.sizes(), (std::vector<std::int64_t>{15, 7}));
      EXPECT_EQ(model->scale.sizes(), (std::vector<std::int64_t>{5}));
      EXPECT_EQ(model->twice->up->bias.sizes(), (std::vector<std::int64_t>{15}));
      EXPECT_THAT(unit_names(model), ElementsAre("", "twice", "inner", "never", "head"));
      SmallModel alone = make_model();
      loss_of(alone->forward(batch_of(0, group.rank()))).backward();
      loss_of(model(batch_of(0, group.rank()))).backward();
      for (const auto& [found, expected] : {std::pair(model->first->up->weight, alone->first->up->weight),
                                            {model->scale, alone->scale},
                                            {model->twice->up->bias, alone->twice->up->bias}}) {
        EXPECT_TRUE(at::allclose(found.grad(), expected.grad()));  // this rank's own
      }
      constexpr std::size_t kIgnored = 4 + 1 + 1;
      EXPECT_EQ(model.parameters().size(),
                options.use_orig_params ? unique_params(*alone).size() : model.unit_count() + kIgnored);
    }
  });
}

TEST(FsdpTest, FrozenParametersAmongOthersAndWholeFrozenUnits) {
  const auto freeze = [](SmallModel model) {
    model->first->up->weight.set_requires_grad(false);  // its input has a gradient that is computed last
    for (const at::Tensor& param : model->inner->parameters()) param.set_requires_grad(false);
    return model;
  };
  SmallModel alone = freeze(make_model());
  backward_of_all(alone, {0}, 2);
  run_local(2, [&](const ProcessGroup& group) {
    for (const auto strategy : {ShardingStrategy::full_shard, ShardingStrategy::no_shard}) {
      Options options;
      options.strategy = strategy;
      FullyShardedDataParallel<SmallModel> model(freeze(make_model()), group, options);
      for (int times = 0; times < 2; ++times) {
        model.zero_grad();
        loss_of(model(batch_of(0, group.rank()))).backward();
        expect_same_grads(unsharded_grads(model), *alone);
      }
    }
  });
}

// A model whose forward differs between ranks, inside units that all ranks call.
struct BranchingImpl : torch::nn::Module {
  BranchingImpl() {
    even = register_module("even", torch::nn::Linear(5, 5));
    odd = register_module("odd", torch::nn::Linear(5, 5));
  }
  at::Tensor forward(const at::Tensor& x, bool is_odd) { return is_odd ? odd(x) : even(x); }
  torch::nn::Linear even{nullptr}, odd{nullptr};
};
TORCH_MODULE(Branching);
struct BranchesImpl : torch::nn::Module {
  BranchesImpl() {
    for (int i = 0; i < 3; ++i) {
      branches.push_back(register_module("branch" + std::to_string(i), Wrap<Branching>()));
    }
    head = register_parameter("head", at::ones({5, 3}));
    unused = register_parameter("unused", at::ones({4}));
  }
  at::Tensor forward(at::Tensor x) {
    for (std::size_t i = 0; i < branches.size(); ++i) x = at::tanh(branches[i](x, (i + odd) % 2 == 1));
    return at::matmul(x, head);
  }
  std::vector<Wrap<Branching>> branches;
  at::Tensor head, unused;
  std::size_t odd = 0;
};
TORCH_MODULE(Branches);

TEST(FsdpTest, ParametersThatOnlySomeRanksUse) {
  const auto make = [](int rank) {
    Branches model;
    fill(*model);
    model->odd = static_cast<std::size_t>(rank);
    return model;
  };
  std::vector<Branches> alone;
  std::vector<at::Tensor> sums;
  for (int rank = 0; rank < 3; ++rank) {
    alone.push_back(make(rank));
    loss_of(alone.back()->forward(batch_of(0, rank))).backward();
    std::size_t i = 0;
    for (const at::Tensor& param : alone.back()->parameters()) {
      if (rank == 0) sums.push_back(at::zeros_like(param).detach());
      if (param.grad().defined()) sums[i].add_(param.grad());
      ++i;
    }
  }
  run_local(3, [&](const ProcessGroup& group) {
    FullyShardedDataParallel<Branches> model(make(group.rank()), group);
    for (int times = 0; times < 3; ++times) {
      model.zero_grad();
      loss_of(model(batch_of(0, group.rank()))).backward();
      const std::vector<at::Tensor> grads = unsharded_grads(model);
      for (std::size_t i = 0; i < grads.size(); ++i) {
        EXPECT_TRUE(at::allclose(grads[i], sums[i].div(3), 1e-12, 1e-14)) << i;
      }
    }
  });
}

TEST(FsdpTest, SeveralForwardsBeforeOneBackward) {
  SmallModel alone = make_model();
  (loss_of(alone->forward(batch_of(0, 0))) + loss_of(alone->forward(batch_of(1, 0)))).backward();
  for (const auto& [low, use_orig_params] : {std::pair(false, true), {true, true}, {false, false}, {true, false}}) {
    run_local(2, [&, low = low, use_orig_params = use_orig_params](const ProcessGroup& group) {
      Options options;
      options.use_orig_params = use_orig_params;
      if (low) options.mixed_precision.param_dtype = at::kFloat;
      FullyShardedDataParallel<SmallModel> model(make_model(), group, options);
      for (int times = 0; times < 2; ++times) {
        model.zero_grad();
        const at::Tensor first = loss_of(model(batch_of(0, 0)));
        {
          const at::NoGradGuard no_grad;
          model(batch_of(3, 0));
        }
        (first + loss_of(model(batch_of(1, 0)))).backward();
        const std::vector<at::Tensor> grads = unsharded_grads(model);
        const std::vector<at::Tensor> expected = unique_params(*alone);
        for (std::size_t i = 0; i < grads.size(); ++i) {
          if (!expected[i].grad().defined()) continue;
          EXPECT_TRUE(at::allclose(grads[i], expected[i].grad(), low ? 1e-4 : 1e-12, low ? 1e-5 : 1e-14)) << i;
        }
      }
      const at::Tensor one = loss_of(model(batch_of(0, 0))), two = loss_of(model(batch_of(1, 0)));
      model.zero_grad();
      one.backward();
      two.backward();
      const std::vector<at::Tensor> grads = unsharded_grads(model);
      EXPECT_TRUE(at::allclose(grads[0], unique_params(*alone)[0].grad(), low ? 1e-4 : 1e-12, low ? 1e-5 : 1e-14));
    });
  }
}

// Records how many units are unsharded at each call of a unit and at each computation of its gradient.
struct WatchedImpl : torch::nn::Module {
  explicit WatchedImpl(std::function<void()> watch_in) : watch(std::move(watch_in)) {
    linear = register_module("linear", torch::nn::Linear(5, 5));
  }
  at::Tensor forward(const at::Tensor& x) {
    watch();
    const at::Tensor result = at::tanh(linear(x));
    if (result.requires_grad()) result.register_hook([this](const at::Tensor&) { watch(); });
    return result;
  }
  torch::nn::Linear linear{nullptr};
  std::function<void()> watch;
};
TORCH_MODULE(Watched);

TEST(FsdpTest, NoMoreUnitsAreWholeThanTheOneThatComputesAndThoseThatArePrefetched) {
  run_local(2, [&](const ProcessGroup& group) {
    for (const auto& [prefetched, freezes] : {std::pair(0, false), {1, false}, {2, false}, {0, true}, {1, true}}) {
      const ShardedModule* sharded = nullptr;
      int highest = 0;
      const auto watch = [&] {
        int gathered = 0;
        for (std::size_t i = 0; i < sharded->unit_count(); ++i) gathered += sharded->handle(i).is_gathered() ? 1 : 0;
        highest = std::max(highest, gathered);
      };
      torch::nn::Sequential plain;
      for (int i = 0; i < 6; ++i) {
        Wrap<Watched> layer{std::function<void()>(watch)};
        layer->linear->bias.set_requires_grad(!freezes);
        plain->push_back(std::move(layer));
      }
      Options options;
      options.max_prefetched_units = prefetched;
      FullyShardedDataParallel<torch::nn::Sequential> model(plain, group, options);
      sharded = &model;
      for (int step = 0; step < 3; ++step) {
        if (step == 1) model(at::ones({2, 5}));  // without a backward
        model(at::ones({2, 5})).sum().backward();
      }
      EXPECT_EQ(highest, 1 + prefetched);
      for (std::size_t i = 0; i < model.unit_count(); ++i) EXPECT_FALSE(model.handle(i).is_gathered());
    }
  });
}

TEST(FsdpTest, WhatARankHasShrinksAsThereAreMoreRanks) {
  std::int64_t all = 0;
  for (const at::Tensor& param : unique_params(*make_model())) all += param.numel();
  for (const int ranks : {1, 2, 4, 8}) {
    run_local(ranks, [&](const ProcessGroup& group) {
      FullyShardedDataParallel<SmallModel> model(make_model(), group);
      torch::optim::AdamW optimizer(model.parameters(), torch::optim::AdamWOptions(0.01));
      loss_of(model(batch_of(0, group.rank()))).backward();
      optimizer.step();
      std::int64_t params = 0, grads = 0, states = 0;
      for (const at::Tensor& param : model.parameters()) {
        params += param.numel();
        if (param.grad().defined()) grads += param.grad().numel();
      }
      const StateDict optimizer_state = get_optimizer_state_dict(*model.module_ptr(), optimizer);
      for (const auto& [name, state] : optimizer_state.at("state").get<Dict>()) {
        states += state.get<Dict>().at("exp_avg").get<at::Tensor>().numel();
      }
      // Each unit's shard is padded to a multiple of 2 elements of 8 bytes.
      const std::int64_t most = all / ranks + 2 * static_cast<std::int64_t>(model.unit_count()) * (ranks > 1 ? 4 : 1);
      for (const std::int64_t numel : {params, grads, states}) EXPECT_LE(numel, most);
      std::int64_t shards = 0;
      for (std::size_t i = 0; i < model.unit_count(); ++i) shards += model.handle(i).flat_param().numel();
      EXPECT_LE(shards, most);
    });
  }
}

// A unit with one element has the same number of elements whether sharded or unsharded.
struct GainImpl : torch::nn::Module {
  GainImpl() { gain = register_parameter("gain", at::full({1}, 0.7)); }
  at::Tensor forward(const at::Tensor& x) { return x * gain; }
  at::Tensor gain;
};
TORCH_MODULE(Gain);

TEST(FsdpTest, AUnitOfOneElementAddsItsGradientsUp) {
  const auto make = [] {
    torch::nn::Sequential model;
    model->push_back(Wrap<Gain>());
    model->push_back(Wrap<torch::nn::Linear>(5, 2));
    fill(*model);
    return model;
  };
  torch::nn::Sequential alone = make();
  backward_of_all(alone, {0, 1, 2}, 2);
  for (const bool use_orig_params : {true, false}) {
    run_local(2, [&](const ProcessGroup& group) {
      Options options;
      options.use_orig_params = use_orig_params;
      FullyShardedDataParallel<torch::nn::Sequential> model(make(), group, options);
      for (int step = 0; step < 3; ++step) loss_of(model(batch_of(step, group.rank()))).backward();
      expect_same_grads(unsharded_grads(model), *alone);
    });
  }
}

TEST(FsdpTest, BuffersAreCastAndTheStateHasThemAsTheyWere) {
  run_local(2, [&](const ProcessGroup& group) {
    Options options;
    options.mixed_precision.param_dtype = at::kBFloat16;
    options.mixed_precision.buffer_dtype = at::kBFloat16;
    FullyShardedDataParallel<SmallModel> model(make_model(at::kFloat), group, options);
    model(batch_of(0, 0, at::kFloat));
    EXPECT_EQ(model->count.scalar_type(), at::kBFloat16);
    model.state_dict();
    EXPECT_EQ(model->count.scalar_type(), at::kFloat);
  });
}

TEST(FsdpTest, FullPrecisionInEvalWhereTheEnvironmentSaysSo) {
  ::setenv("FSDP_USE_FULL_PREC_IN_EVAL", "1", 1);
  run_local(2, [&](const ProcessGroup& group) {
    Options options;
    options.mixed_precision.param_dtype = at::kBFloat16;
    FullyShardedDataParallel<SmallModel> model(make_model(at::kFloat), group, options);
    SmallModel alone = make_model(at::kFloat);
    const at::Tensor batch = batch_of(0, 0, at::kFloat);
    EXPECT_EQ(model(batch).scalar_type(), at::kBFloat16);
    model.eval();
    const at::Tensor found = model(batch);
    EXPECT_EQ(found.scalar_type(), at::kFloat);
    EXPECT_TRUE(at::equal(found, alone->forward(batch)));
    model.train();
    EXPECT_EQ(model(batch).scalar_type(), at::kBFloat16);

    torch::nn::Sequential units{Wrap<Block>(5), Wrap<Block>(5)};  // no parameters of its own
    fill(*units, at::kFloat);
    const at::Tensor expected = units->forward(batch).detach();
    FullyShardedDataParallel<torch::nn::Sequential> of_units(units, group, options);
    EXPECT_EQ(of_units(batch).scalar_type(), at::kBFloat16);
    of_units.eval();
    EXPECT_TRUE(at::equal(of_units(batch), expected));
  });
  ::unsetenv("FSDP_USE_FULL_PREC_IN_EVAL");
}

TEST(FsdpTest, RankZerosStateIsEveryones) {
  run_local(4, [&](const ProcessGroup& group) {
    for (const bool is_hybrid : {false, true}) {
      SmallModel plain = make_model();
      if (group.rank() != 0) {
        const at::NoGradGuard no_grad;
        for (const at::Tensor& param : plain->parameters()) param.detach().fill_(group.rank());
        plain->count.fill_(group.rank());
      }
      Options options;
      options.sync_module_states = true;
      ProcessGroup shards = group;
      if (is_hybrid) {
        const HybridGroups groups = hybrid_groups(group, 2);
        shards = groups.shards;
        options.strategy = ShardingStrategy::hybrid_shard;
        options.replicas = groups.replicas;
      }
      FullyShardedDataParallel<SmallModel> model(plain, shards, options);
      SmallModel expected = make_model();
      EXPECT_TRUE(at::equal(model->count, expected->count));
      const std::vector<at::Tensor> found = full_params(model), params = expected->parameters();
      for (std::size_t i = 0; i < found.size(); ++i) EXPECT_TRUE(at::equal(found[i], params[i])) << i;
    }
  });
}

TEST(FsdpTest, HybridShardingTrainsAsOneGroup) {
  SmallModel alone = make_model();
  backward_of_all(alone, {0}, 4);
  for (const auto strategy : {ShardingStrategy::hybrid_shard, ShardingStrategy::hybrid_shard_zero2}) {
    const TemporaryDirectory directory;
    run_local(4, [&](const ProcessGroup& group) {
      const HybridGroups groups = hybrid_groups(group, 2);
      Options options;
      options.strategy = strategy;
      options.replicas = groups.replicas;
      FullyShardedDataParallel<SmallModel> model(make_model(), groups.shards, options);
      loss_of(model(batch_of(0, group.rank()))).backward();
      expect_same_grads(unsharded_grads(model), *alone);
      save({{"model", model.state_dict()}}, directory.path(), group);
      StateDict state{{"model", model.state_dict()}};
      model.summon_full_params([&] {
        for (const at::Tensor& param : model->parameters()) param.detach().zero_();
      });
      load(state, directory.path(), group);
      model.summon_full_params([&] { EXPECT_TRUE(at::equal(model->inner->weight, alone->inner->weight)); });
      EXPECT_ERROR(hybrid_groups(group, 3), ErrorCode::invalid_argument, "expected a divisor of the group's 4 ranks");
    });
  }
}

// A layer whose weight belongs to the caller.
struct SharesImpl : torch::nn::Module {
  explicit SharesImpl(const at::Tensor& shared) { weight = register_parameter("weight", shared); }
  at::Tensor forward(const at::Tensor& x) { return at::matmul(x, weight); }
  at::Tensor weight;
};
TORCH_MODULE(Shares);

TEST(FsdpTest, AParameterInTwoUnitsIsRefusedAndBelongsToWhatHoldsBoth) {
  run_local(2, [&](const ProcessGroup& group) {
    const auto make = [] {
      const at::Tensor shared = at::arange(25, at::kDouble).reshape({5, 5}).mul(0.1).sin();
      return torch::nn::Sequential{Wrap<Shares>(shared), torch::nn::Tanh(), Wrap<Shares>(shared)};
    };
    EXPECT_ERROR(FullyShardedDataParallel<torch::nn::Sequential>(make(), group), ErrorCode::invalid_argument,
                 "'0.weight' of unit '0' is also '2.weight' of unit '2'", "exclude both modules from the policy");
    Options options;
    options.policy = wrap_none();
    torch::nn::Sequential alone = make();
    FullyShardedDataParallel<torch::nn::Sequential> model(make(), group, options);
    EXPECT_TRUE(at::equal(model(batch_of(0, 0)), alone->forward(batch_of(0, 0))));
  });
}

TEST(FsdpTest, AModuleThatIsShardedAlreadyIsRefused) {
  SmallModel plain = make_model();
  FullyShardedDataParallel<SmallModel> model(plain);
  EXPECT_ERROR(FullyShardedDataParallel<SmallModel>{plain}, ErrorCode::invalid_argument,
               "module 'first' is sharded already");
}

TEST(FsdpTest, APlainModuleThatIsShardedAlreadyIsRefused) {
  run_local(2, [](const ProcessGroup& group) {
    const auto linear = std::make_shared<torch::nn::LinearImpl>(4, 4);
    {
      const FullyShardedDataParallel<torch::nn::LinearImpl> model(linear, group);
      EXPECT_ERROR(FullyShardedDataParallel<torch::nn::LinearImpl>(linear, group), ErrorCode::invalid_argument,
                   "module '' is sharded already");
    }
  });
}

struct UnorderedImpl : torch::nn::Module {
  UnorderedImpl() {
    one = register_module("one", Wrap<torch::nn::Linear>(5, 5));
    other = register_module("other", Wrap<torch::nn::Linear>(5, 5));
  }
  at::Tensor forward(const at::Tensor& x, int order) {
    if (order == 0) return other(one(x));
    if (order == 1) return one(other(x));
    return one(x);
  }
  Wrap<torch::nn::Linear> one{nullptr}, other{nullptr};
};
TORCH_MODULE(Unordered);

TEST(FsdpTest, RanksThatCallUnitsInAnotherOrderAreTold) {
  run_local(2, [&](const ProcessGroup& group) {
    {
      FullyShardedDataParallel<Unordered> model(Unordered(), group);
      EXPECT_ERROR(model(at::ones({2, 5}), group.rank()), ErrorCode::invalid_argument,
                   "rank 1 calls 'other', rank 0 calls 'one'", "the same units in the same order");
    }
    FullyShardedDataParallel<Unordered> model(Unordered(), group);
    EXPECT_ERROR(model(at::ones({2, 5}), 2 * group.rank()), ErrorCode::invalid_argument,
                 "rank 1 ended forward, rank 0 calls 'other'");
    model(at::ones({2, 5}), 0);  // the model remains usable
  });
}

TEST(FsdpTest, AModelThatThrewInForwardOrBackwardCanBeUsedAfterwards) {
  struct Throws : torch::autograd::Function<Throws> {
    static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) { return x.clone(); }
    static torch::autograd::variable_list backward(torch::autograd::AutogradContext*, torch::autograd::variable_list) {
      throw std::runtime_error("in backward");
    }
  };
  SmallModel alone = make_model();
  backward_of_all(alone, {0}, 2);
  run_local(2, [&](const ProcessGroup& group) {
    FullyShardedDataParallel<SmallModel> model(make_model(), group);
    EXPECT_THROW(model(at::ones({2, 9}, at::kDouble)), std::exception);
    const at::Tensor input = batch_of(0, group.rank()).requires_grad_(true);
    const at::Tensor result = model(Throws::apply(input));
    EXPECT_THROW(loss_of(result).backward(), std::exception);
    model(batch_of(0, 0));
    EXPECT_EQ(model->inner->weight.dim(), 1);
    model.zero_grad();
    loss_of(model(batch_of(0, group.rank()))).backward();
    expect_same_grads(unsharded_grads(model), *alone);
  });
}

TEST(FsdpTest, CommunicationCanBeFakedToMeasureIt) {
  ::setenv("FSDP_USE_FAKE_ALL_GATHER", "1", 1);
  ::setenv("FSDP_USE_FAKE_REDUCE", "1", 1);
  run_local(2, [&](const ProcessGroup& group) {
    FullyShardedDataParallel<SmallModel> model(make_model(), group);
    if (group.rank() == 0) loss_of(model(batch_of(0, 0))).backward();
    SmallModel alone = make_model();
    if (group.rank() == 1) {
      EXPECT_FALSE(at::equal(model(batch_of(0, 0)), alone->forward(batch_of(0, 0))));
    }
  });
  ::unsetenv("FSDP_USE_FAKE_ALL_GATHER");
  ::unsetenv("FSDP_USE_FAKE_REDUCE");
}

}  // namespace
}  // namespace tessera::fsdp
