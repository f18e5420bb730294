// State dicts of a sharded model: saved and loaded on different numbers of ranks, full and sharded.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include "fsdp/small_model.h"
#include "support/chaos.h"
#include "support/error_matchers.h"
#include "support/temporary_directory.h"
#include "tessera/comm/local_ranks.h"
#include "tessera/state/load.h"
#include "tessera/state/module_state.h"
#include "tessera/state/optimizer_state.h"
#include "tessera/state/save.h"

namespace tessera::fsdp {
namespace {

using testing::SampleIfSanitized;
using testing::TemporaryDirectory;

std::unique_ptr<torch::optim::Optimizer> make_adamw(const std::vector<at::Tensor>& params) {
  return std::make_unique<torch::optim::AdamW>(params, torch::optim::AdamWOptions(0.02));
}

struct Trained {
  explicit Trained(const ProcessGroup& group, const Options& options)
      : model(make_model(), group, options), optimizer(make_adamw(model.parameters())) {}

  // Returns the loss over the batches of all ranks.
  double step(int step) {
    const double loss =
        backward_of_batches(model, kBatches, [&](int batch) { return loss_of(model(batch_of(step, batch))); });
    optimizer->step();
    return loss;
  }
  StateDict state() { return {{"model", model.state_dict()}, {"optim", model.optim_state_dict(*optimizer)}}; }

  FullyShardedDataParallel<SmallModel> model;
  std::unique_ptr<torch::optim::Optimizer> optimizer;
};

std::vector<double> losses_of(int steps) {
  std::vector<double> losses;
  run_local(1, [&](const ProcessGroup& group) {
    Trained one(group, {});
    for (int step = 0; step < steps; ++step) losses.push_back(one.step(step));
  });
  return losses;
}

TEST(FsdpStateDictTest, SavedOnSomeRanksItGoesOnOnOthers) {
  const std::vector<double> losses = losses_of(6);
  SampleIfSanitized sample(11);
  for (const Options& saved : kWays) {
    for (const int savers : {1, 4}) {
      const TemporaryDirectory directory;
      run_local(savers, [&](const ProcessGroup& group) {
        Trained one(group, saved);
        for (int step = 0; step < 3; ++step) {
          EXPECT_NEAR(one.step(step), losses[static_cast<std::size_t>(step)], 1e-10);
        }
        save(one.state(), directory.path(), group);
      });
      for (const Options& loaded : {kWays[0], kWays[1], kWays[4]}) {
        for (const int loaders : {1, 2, 3, 8}) {
          if (!sample.takes_next()) continue;
          run_local(loaders, [&](const ProcessGroup& group) {
            Trained one(group, loaded);
            StateDict state = one.state();
            load(state, directory.path(), group);
            one.model.load_state_dict(state.at("model").get<Dict>());
            one.model.load_optim_state_dict(*one.optimizer, state.at("optim").get<Dict>());
            for (int step = 3; step < 6; ++step) {
              EXPECT_NEAR(one.step(step), losses[static_cast<std::size_t>(step)], 1e-10)
                  << savers << " to " << loaders << " ranks";
            }
          });
        }
      }
    }
  }
}

TEST(FsdpStateDictTest, TheShardedStateIsTheMemoryOfTheShard) {
  run_local(3, [&](const ProcessGroup& group) {
    for (const bool use_orig_params : {true, false}) {
      FullyShardedDataParallel<SmallModel> model(make_model(), group,
                                                 options_of(ShardingStrategy::full_shard, use_orig_params));
      const StateDict state = model.state_dict();
      std::int64_t elements = 0;
      for (const auto& [key, value] : state) {
        if (value.is<at::Tensor>()) continue;  // a buffer
        const auto& part = value.get<std::shared_ptr<Checkpointable>>();
        for (std::size_t i = 0; i < part->local_chunks().size(); ++i) {
          bool is_view = false;
          for (std::size_t unit = 0; unit < model.unit_count(); ++unit) {
            is_view = is_view || part->local_tensor(i).is_alias_of(model.handle(unit).flat_param());
          }
          EXPECT_TRUE(is_view);
          if (std::get<std::string>(key) != "tied") elements += part->local_tensor(i).numel();
        }
      }
      const at::Tensor sum = at::full({1}, elements, at::kLong);
      group.all_reduce(sum);
      std::int64_t expected = 0;
      for (const at::Tensor& param : unique_params(*make_model())) expected += param.numel();
      EXPECT_EQ(sum.item<std::int64_t>(), expected);
    }
  });
}

TEST(FsdpStateDictTest, TheFullStateIsThatOfTheModelAndBack) {
  SampleIfSanitized sample(3);
  for (const Options& way : kWays) {
    for (const bool rank0_only : {true, false}) {
      if (!sample.takes_next()) continue;
      run_local(3, [&](const ProcessGroup& group) {
        Trained one(group, way);
        for (int step = 0; step < 2; ++step) one.step(step);
        FullStateOptions full;
        full.rank0_only = rank0_only;
        const StateDict state = one.model.state_dict(StateDictType::full, full);
        const StateDict optim = one.model.optim_state_dict(*one.optimizer, StateDictType::full, full);
        if (rank0_only && group.rank() != 0) {
          EXPECT_TRUE(state.empty() && optim.empty());
        } else {
          SmallModel plain = make_model();
          set_model_state_dict(*plain, state);
          auto plain_optimizer = make_adamw(unique_params(*plain));
          set_optimizer_state_dict(*plain, *plain_optimizer, optim);
          double expected = 0;
          for (int batch = 0; batch < kBatches; ++batch) {
            expected += loss_of(plain->forward(batch_of(7, batch))).item<double>() / kBatches;
          }
          if (!rank0_only) {
            Trained alone(ProcessGroup(), {});
            alone.model.load_state_dict(state);
            alone.model.load_optim_state_dict(*alone.optimizer, optim);
            EXPECT_NEAR(alone.step(7), expected, 1e-12);
          }
        }
        Trained other(group, options_of(ShardingStrategy::full_shard, !way.use_orig_params));
        other.model.load_state_dict(state, full);
        other.model.load_optim_state_dict(*other.optimizer, optim, full);
        for (int step = 2; step < 4; ++step) EXPECT_NEAR(other.step(step), one.step(step), 1e-12);
      });
    }
  }
}

TEST(FsdpStateDictTest, TheLocalStateIsTheFlatParameters) {
  run_local(2, [&](const ProcessGroup& group) {
    Trained one(group, {}), other(group, {});
    one.step(0);
    const StateDict state = one.model.state_dict(StateDictType::local);
    EXPECT_TRUE(state.at("first._flat_param").is<ShardedTensor>());
    EXPECT_TRUE(state.at("_flat_param").is<ShardedTensor>());
    EXPECT_TRUE(state.at("count").is<at::Tensor>());
    other.model.load_state_dict(state);
    EXPECT_TRUE(at::equal(other.model.handle(1).flat_param(), one.model.handle(1).flat_param()));
    EXPECT_ERROR(one.model.optim_state_dict(*one.optimizer, StateDictType::local), ErrorCode::unsupported, "local");
  });
}

TEST(FsdpStateDictTest, AllThatIsWrongIsNamedAndNothingIsChanged) {
  run_local(2, [&](const ProcessGroup& group) {
    for (const Options& way : kWays) {
      Trained one(group, way);
      FullStateOptions all;
      all.rank0_only = false;
      const StateDict before = one.model.state_dict(StateDictType::full, all);
      StateDict changed = before;
      for (auto& [key, value] : before) changed[key] = value.get<at::Tensor>() + 1;
      StateDict wrong = changed;
      wrong["first.up.weight"] = at::ones({3, 3}, at::kDouble);
      EXPECT_ERROR(one.model.load_state_dict(wrong), ErrorCode::invalid_argument, "'first.up.weight'",
                   "[3, 3], expected [15, 7]", "[15, 7]");
      wrong = changed;
      wrong.erase("inner.bias");
      wrong["stranger"] = at::ones({1});
      EXPECT_ERROR(one.model.load_state_dict(wrong), ErrorCode::invalid_argument, "missing: 'inner.bias'",
                   "unexpected: 'stranger'");
      if (group.rank() == 1) wrong = changed;  // wrong on rank 0 only
      EXPECT_THROW(one.model.load_state_dict(wrong), Error);
      wrong = changed;
      if (group.rank() == 1) wrong[std::int64_t{3}] = at::ones({1});
      EXPECT_ERROR(one.model.load_state_dict(wrong), ErrorCode::invalid_argument, "key 3 is an int, expected a string");
      EXPECT_EQ(one.model.state_dict(StateDictType::full, all), before);
      one.model.load_state_dict(changed);
      EXPECT_EQ(one.model.state_dict(StateDictType::full, all), changed);
    }
  });
}

TEST(FsdpStateDictTest, APartIsLoadedIfItIsNotStrict) {
  run_local(2, [&](const ProcessGroup& group) {
    for (const Options& way : kWays) {
      for (const bool is_full : {true, false}) {
        Trained one(group, way), other(group, way);
        one.step(0);
        FullStateOptions all;
        all.rank0_only = false;
        const StateDict before = other.model.state_dict(StateDictType::full, all);
        const StateDict trained = one.model.state_dict(StateDictType::full, all);
        StateDict part = one.model.state_dict(is_full ? StateDictType::full : StateDictType::sharded, all);
        part.erase("inner.bias");
        part.erase("count");
        part["stranger"] = at::ones({1});
        EXPECT_ERROR(other.model.load_state_dict(part), ErrorCode::invalid_argument, "missing: ", "'inner.bias'");
        EXPECT_EQ(other.model.state_dict(StateDictType::full, all), before);
        const IncompatibleKeys keys = other.model.load_state_dict(part, {.rank0_only = false}, /*strict=*/false);
        EXPECT_THAT(keys.missing, ::testing::UnorderedElementsAre("count", "inner.bias"));
        EXPECT_THAT(keys.unexpected, ::testing::ElementsAre("stranger"));
        const StateDict after = other.model.state_dict(StateDictType::full, all);
        for (const auto& [name, value] : after) {
          const bool is_missing = name == Key("inner.bias") || name == Key("count");
          EXPECT_EQ(value, (is_missing ? before : trained).at(name)) << to_string(name);
        }
        EXPECT_NE(before.at("head.bias"), trained.at("head.bias"));
        // What is of another shape stays an error, and all ranks must agree.
        part["head.bias"] = at::ones({2}, at::kDouble);
        EXPECT_ERROR(other.model.load_state_dict(part, {.rank0_only = false}, /*strict=*/false),
                     ErrorCode::invalid_argument, "head.bias");
        EXPECT_ERROR(other.model.load_state_dict(trained, {.rank0_only = false}, /*strict=*/group.rank() == 0),
                     ErrorCode::invalid_argument, "strict");
        EXPECT_EQ(other.model.state_dict(StateDictType::full, all), after);
      }
    }
  });
}

// PyTorch: test_hsdp_checkpoint, test_hsdp_fsdp_checkpoint_conversion.
TEST(FsdpStateDictTest, HybridShardingAndPlainShardingLoadTheStatesOfEachOther) {
  const std::vector<double> losses = losses_of(6);
  const auto trained = [](const ProcessGroup& group, int shards, bool use_orig_params) {
    Options options =
        options_of(shards == 0 ? ShardingStrategy::full_shard : ShardingStrategy::hybrid_shard, use_orig_params);
    if (shards == 0) return std::make_unique<Trained>(group, options);
    const HybridGroups groups = hybrid_groups(group, shards);
    options.replicas = groups.replicas;
    return std::make_unique<Trained>(groups.shards, options);
  };
  struct Way {
    int ranks, shards;  // ranks that hold one replica, or 0 for plain sharding
  };
  const std::vector<Way> ways = {{4, 2}, {6, 3}, {3, 0}};
  SampleIfSanitized sample(2);
  for (const Way& saved : ways) {
    const auto storage = checkpoint::memory_storage();
    run_local(saved.ranks, [&](const ProcessGroup& group) {
      const auto one = trained(group, saved.shards, true);
      for (int step = 0; step < 3; ++step) {
        EXPECT_NEAR(one->step(step), losses[static_cast<std::size_t>(step)], 1e-10);
      }
      save(one->state(), storage, group);
    });
    for (const Way& loaded : ways) {
      if ((saved.shards == 0 && loaded.shards == 0) || !sample.takes_next()) continue;
      run_local(loaded.ranks, [&](const ProcessGroup& group) {
        const auto one = trained(group, loaded.shards, /*use_orig_params=*/loaded.ranks != 6);
        StateDict state = one->state();
        load(state, storage, group);
        one->model.load_state_dict(state.at("model").get<Dict>());
        one->model.load_optim_state_dict(*one->optimizer, state.at("optim").get<Dict>());
        for (int step = 3; step < 6; ++step) {
          EXPECT_NEAR(one->step(step), losses[static_cast<std::size_t>(step)], 1e-10)
              << saved.ranks << " ranks in shards of " << saved.shards << " to " << loaded.ranks << " in shards of "
              << loaded.shards;
        }
      });
    }
  }
}

TEST(FsdpStateDictTest, AnOptimizerMadeBeforeShardingIsRefused) {
  run_local(2, [&](const ProcessGroup& group) {
    for (const bool use_orig_params : {true, false}) {
      SmallModel plain = make_model();
      const auto optimizer = make_adamw(unique_params(*plain));
      loss_of(plain->forward(batch_of(0, 0))).backward();
      optimizer->step();
      FullyShardedDataParallel<SmallModel> model(plain, group,
                                                 options_of(ShardingStrategy::full_shard, use_orig_params));
      EXPECT_ERROR(model.check_optimizer(*optimizer), ErrorCode::invalid_argument,
                   "construct the optimizer from the sharded model's parameters()");
      EXPECT_ERROR(model.optim_state_dict(*optimizer), ErrorCode::invalid_argument, "construct the optimizer from");
    }
  });
}

}  // namespace
}  // namespace tessera::fsdp
