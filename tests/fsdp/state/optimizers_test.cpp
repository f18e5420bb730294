// Optimizers of sharded models: parameter groups, several optimizers, parameters that are frozen at times.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/optim/adamw.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/small_model.h"
#include "support/error_matchers.h"
#include "tessera/comm/local_ranks.h"
#include "tessera/state/optimizer_state.h"
#include "tessera/tensor/optim/fused_optimizers.h"

namespace tessera::fsdp {
namespace {

// Two groups, of the parameters with two dimensions or more and of the others, where one process has them.
std::vector<torch::optim::OptimizerParamGroup> groups_of(const torch::nn::Module& module) {
  std::vector<at::Tensor> matrices, vectors;
  const SmallModel unsharded = make_model();
  const std::vector<at::Tensor> params = unique_params(module), shapes = unique_params(*unsharded);
  for (std::size_t i = 0; i < params.size(); ++i) (shapes[i].dim() > 1 ? matrices : vectors).push_back(params[i]);
  auto slow = std::make_unique<torch::optim::AdamWOptions>(0.01);
  slow->weight_decay(0.1);
  auto fast = std::make_unique<torch::optim::AdamWOptions>(0.05);
  fast->weight_decay(0);
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(std::move(matrices), std::move(slow));
  groups.emplace_back(std::move(vectors), std::move(fast));
  return groups;
}

void expect_equal_params(const std::vector<at::Tensor>& found, const torch::nn::Module& expected) {
  const std::vector<at::Tensor> params = expected.parameters();
  ASSERT_EQ(found.size(), params.size());
  for (std::size_t i = 0; i < found.size(); ++i) EXPECT_TRUE(at::allclose(found[i], params[i], 1e-9, 1e-11)) << i;
}

// The ways with parameters that groups can be made of.
std::vector<Options> ways_with_parameters() {
  return {options_of(ShardingStrategy::full_shard, true), options_of(ShardingStrategy::shard_grad_op, true),
          options_of(ShardingStrategy::no_shard, true)};
}

// Trains a sharded model with `Optimizer`, and one process with LibTorch's, each also from the other's state.
template <typename Optimizer>
void expect_groups_with_options_of_their_own() {
  run_local(3, [](const ProcessGroup& group) {
    for (const Options& way : ways_with_parameters()) {
      SmallModel alone = make_model();
      FullyShardedDataParallel<SmallModel> model(make_model(), group, way);
      torch::optim::AdamW expected(groups_of(*alone));
      Optimizer optimizer(groups_of(*model.module()));
      for (int step = 0; step < 3; ++step) {
        backward_of_all(alone, {step}, 3);
        expected.step();
        model.zero_grad();
        loss_of(model(batch_of(step, group.rank()))).backward();
        optimizer.step();
      }
      expect_equal_params(full_params(model), *alone);

      // Into one process, as it is, and back.
      const StateDict full = model.optim_state_dict(optimizer, StateDictType::full, {.rank0_only = false});
      ASSERT_EQ(full.at("param_groups").get<List>().size(), 2u);
      SmallModel plain = make_model();
      torch::optim::AdamW of_plain(groups_of(*plain));
      set_model_state_dict(*plain, model.state_dict(StateDictType::full, {.rank0_only = false}));
      set_optimizer_state_dict(*plain, of_plain, full);
      FullyShardedDataParallel<SmallModel> again(make_model(), group, way);
      Optimizer of_again(groups_of(*again.module()));
      again.load_state_dict(model.state_dict());
      again.load_optim_state_dict(of_again, full);
      backward_of_all(alone, {7}, 3);
      backward_of_all(plain, {7}, 3);
      expected.step();
      of_plain.step();
      again.zero_grad();
      loss_of(again(batch_of(7, group.rank()))).backward();
      of_again.step();
      expect_equal_params(plain->parameters(), *alone);
      expect_equal_params(full_params(again), *alone);
    }
  });
}

TEST(FsdpOptimizersTest, GroupsWithOptionsOfTheirOwn) {
  expect_groups_with_options_of_their_own<torch::optim::AdamW>();
}

TEST(FsdpOptimizersTest, FusedStepsAreThoseOfLibTorch) { expect_groups_with_options_of_their_own<FusedAdamW>(); }

TEST(FsdpOptimizersTest, OneOptimizerForEachPart) {
  run_local(2, [](const ProcessGroup& group) {
    for (const Options& way : ways_with_parameters()) {
      SmallModel alone = make_model();
      FullyShardedDataParallel<SmallModel> model(make_model(), group, way);
      const auto parts_of = [](SmallModel& model_of) {
        std::vector<std::unique_ptr<torch::optim::AdamW>> parts;
        for (const auto& child : model_of->children()) {
          parts.push_back(std::make_unique<torch::optim::AdamW>(child->parameters(), torch::optim::AdamWOptions(0.02)));
        }
        return parts;
      };
      SmallModel sharded = model.module();
      const auto expected = parts_of(alone), optimizers = parts_of(sharded);
      for (int step = 0; step < 4; ++step) {
        backward_of_all(alone, {step}, 2);
        model.zero_grad();
        loss_of(model(batch_of(step, group.rank()))).backward();
        for (std::size_t i = 0; i < optimizers.size(); ++i) {
          if (step == 1 && i == 0) continue;  // each at its own pace
          expected[i]->step();
          optimizers[i]->step();
        }
      }
      expect_equal_params(full_params(model), *alone);
      for (const auto& optimizer : optimizers) {
        const StateDict state = model.optim_state_dict(*optimizer, StateDictType::full, {.rank0_only = false});
        model.load_optim_state_dict(*optimizer, state);
      }
    }
  });
}

TEST(FsdpOptimizersTest, ParametersThatAreFrozenAtTimes) {
  run_local(3, [](const ProcessGroup& group) {
    for (const Options& way : ways_with_parameters()) {
      SmallModel alone = make_model();
      FullyShardedDataParallel<SmallModel> model(make_model(), group, way);
      torch::optim::AdamW expected(unique_params(*alone), 0.02), optimizer(model.parameters(), 0.02);
      for (int step = 0; step < 4; ++step) {
        const bool is_frozen = step == 0 || step == 2;
        for (const SmallModel& each : {alone, model.module()}) {
          each->inner->weight.set_requires_grad(!is_frozen);
          for (const at::Tensor& param : each->first->parameters()) param.set_requires_grad(step != 1);
        }
        for (const at::Tensor& param : unique_params(*alone)) param.mutable_grad().reset();
        backward_of_all(alone, {step}, 3);
        expected.step();
        for (const at::Tensor& param : model.parameters()) param.mutable_grad().reset();
        loss_of(model(batch_of(step, group.rank()))).backward();
        optimizer.step();
        if (step == 0) {  // without a state of the parameters that were never updated
          const StateDict state = model.optim_state_dict(optimizer, StateDictType::full, {.rank0_only = false});
          EXPECT_FALSE(state.at("state").get<Dict>().contains("inner.weight"));
          EXPECT_TRUE(state.at("state").get<Dict>().contains("inner.bias"));
          model.load_optim_state_dict(optimizer, state);
        }
      }
      expect_equal_params(full_params(model), *alone);
    }
  });
}

// A sharded model and an optimizer with two groups, or with one of all parameters.
struct WithOptimizer {
  WithOptimizer(const ProcessGroup& group, const Options& options, bool has_two_groups)
      : model(make_model(), group, options),
        optimizer(has_two_groups ? groups_of(*model.module()) : one_group(model.parameters()),
                  torch::optim::AdamWOptions(0.02)) {}
  static std::vector<torch::optim::OptimizerParamGroup> one_group(std::vector<at::Tensor> params) {
    std::vector<torch::optim::OptimizerParamGroup> groups;
    groups.emplace_back(std::move(params));
    return groups;
  }
  // Trains with the batches of `kBatches` ranks.
  double step(int step) {
    const double loss =
        backward_of_batches(model, kBatches, [&](int batch) { return loss_of(model(batch_of(step, batch))); });
    optimizer.step();
    return loss;
  }
  StateDict full_model() { return model.state_dict(StateDictType::full, {.rank0_only = false}); }
  StateDict full_optim() { return model.optim_state_dict(optimizer, StateDictType::full, {.rank0_only = false}); }
  Value exp_avg_of(const std::string& name) {
    return full_optim().at("state").get<Dict>().at(name).get<Dict>().at("exp_avg");
  }

  FullyShardedDataParallel<SmallModel> model;
  torch::optim::AdamW optimizer;
};

// PyTorch: test_shard_full_optim_state_dict_nested, test_scatter_full_optim_state_dict_nested and those with
// halve_world_size, test_use_orig_params.
TEST(FsdpOptimizersTest, AFullStateGoesIntoOtherUnitsOnOtherRanks) {
  for (const bool has_two_groups : {true, false}) {
    StateDict model, optim;
    std::vector<double> losses;
    run_local(4, [&](const ProcessGroup& group) {
      WithOptimizer one(group, {}, has_two_groups);
      for (int step = 0; step < 2; ++step) one.step(step);
      const StateDict params = one.full_model(), states = one.full_optim();
      const std::vector<double> next{one.step(2), one.step(3)};
      if (group.rank() == 0) model = params, optim = states, losses = next;
    });
    EXPECT_EQ(optim.at("param_groups").get<List>().size(), has_two_groups ? 2u : 1u);
    run_local(2, [&](const ProcessGroup& group) {
      for (const bool rank0_only : {true, false}) {
        for (Options options : has_two_groups ? ways_with_parameters() : std::vector<Options>{kWays[1], kWays[4]}) {
          options.policy = rank0_only ? wrap_none() : wrap_modules<torch::nn::LinearImpl>();
          WithOptimizer other(group, options, has_two_groups);
          const bool has_state = !rank0_only || group.rank() == 0;
          other.model.load_state_dict(has_state ? model : StateDict(), {.rank0_only = rank0_only});
          other.model.load_optim_state_dict(other.optimizer, has_state ? optim : StateDict(),
                                            {.rank0_only = rank0_only});
          for (int step = 2; step < 4; ++step) {
            EXPECT_NEAR(other.step(step), losses[static_cast<std::size_t>(step - 2)], 1e-10);
          }
        }
      }
    });
  }
}

TEST(FsdpOptimizersTest, GroupsOfFlatParameters) {
  run_local(3, [](const ProcessGroup& group) {
    const auto optimizer_of = [](const ShardedModule& model, double lr) {
      std::vector<at::Tensor> params = model.parameters();
      auto slow = std::make_unique<torch::optim::AdamWOptions>(lr / 10);
      std::vector<torch::optim::OptimizerParamGroup> groups;
      groups.emplace_back(std::vector<at::Tensor>{params.front()}, std::move(slow));
      groups.emplace_back(std::vector<at::Tensor>(params.begin() + 1, params.end()));
      return torch::optim::AdamW(std::move(groups), torch::optim::AdamWOptions(lr));
    };
    for (const Options& way : {kWays[1], kWays[4]}) {
      FullyShardedDataParallel<SmallModel> model(make_model(), group, way), other(make_model(), group, way);
      torch::optim::AdamW optimizer = optimizer_of(model, 0.02), of_other = optimizer_of(other, 0.7);
      const auto step_of = [&](FullyShardedDataParallel<SmallModel>& of, torch::optim::AdamW& with, int step) {
        of.zero_grad();
        loss_of(of(batch_of(step, group.rank()))).backward();
        with.step();
      };
      step_of(model, optimizer, 0);
      const StateDict full = model.optim_state_dict(optimizer, StateDictType::full, {.rank0_only = false});
      const List& groups = full.at("param_groups").get<List>();
      ASSERT_EQ(groups.size(), 2u);
      EXPECT_EQ(groups[0].get<Dict>().at("params"), Value(List{"scale", "weight"}));
      EXPECT_EQ(groups[0].get<Dict>().at("lr"), Value(0.002));
      other.load_state_dict(model.state_dict());
      other.load_optim_state_dict(of_other, full);
      step_of(model, optimizer, 1);
      step_of(other, of_other, 1);
      const std::vector<at::Tensor> expected = full_params(model), found = full_params(other);
      for (std::size_t i = 0; i < found.size(); ++i) EXPECT_TRUE(at::equal(found[i], expected[i])) << i;
    }
  });
}

// PyTorch: test_shard_full_optim_state_dict_unmanaged_params.
TEST(FsdpOptimizersTest, StateOfParametersThatAreNotShardedOrNotInTheModel) {
  run_local(2, [](const ProcessGroup& group) {
    for (const bool use_orig_params : {true, false}) {
      const Options options = options_of(ShardingStrategy::full_shard, use_orig_params);
      WithOptimizer one(group, options, false);
      one.step(0);
      StateDict state = one.full_optim();
      state.at("state").get<Dict>()["elsewhere.weight"] = Dict{{"step", 3}, {"exp_avg", at::ones({2})}};
      state.at("param_groups").get<List>()[0].get<Dict>().at("params").get<List>().push_back("elsewhere.weight");

      const SmallModel plain = make_model();
      Options ignoring = options;
      ignoring.ignored_modules = {plain->first.ptr()};
      FullyShardedDataParallel<SmallModel> other(plain, group, ignoring);
      torch::optim::AdamW optimizer(other.parameters(), torch::optim::AdamWOptions(0.5));
      other.load_optim_state_dict(optimizer, state);
      const StateDict loaded = other.optim_state_dict(optimizer, StateDictType::full, {.rank0_only = false});
      const Dict& states = loaded.at("state").get<Dict>();
      EXPECT_FALSE(states.contains("elsewhere.weight"));
      state.at("state").get<Dict>().erase("elsewhere.weight");
      EXPECT_EQ(Value(states), state.at("state"));
      EXPECT_TRUE(other.optim_state_dict(optimizer)
                      .at("state")
                      .get<Dict>()
                      .at("first.up.bias")
                      .get<Dict>()
                      .at("exp_avg")
                      .is<at::Tensor>());
      EXPECT_EQ(static_cast<const torch::optim::AdamWOptions&>(optimizer.param_groups()[0].options()).lr(), 0.02);
    }
  });
}

// PyTorch: test_rekey_optim_state_dict_to_ids, test_rekey_optim_state_dict_to_names.
TEST(FsdpOptimizersTest, ParametersOfAStateMayHaveNumbers) {
  run_local(2, [](const ProcessGroup& group) {
    for (const Options& way : kWays) {
      for (const bool rank0_only : {true, false}) {
        WithOptimizer one(group, way, false), other(group, way, false);
        one.step(0);
        const StateDict named = one.full_optim();
        // As Python's optimizer of the model that is not sharded has it.
        StateDict numbered = rekey_optim_state_dict(named, OptimStateKeyType::param_id, *make_model());
        ASSERT_TRUE(numbered.at("state").get<Dict>().contains(3));
        SmallModel plain = make_model();
        torch::optim::AdamW of_plain(unique_params(*plain), torch::optim::AdamWOptions(0.3));
        if (way.use_orig_params) {
          const StateDict by_optimizer =
              rekey_optim_state_dict(named, OptimStateKeyType::param_id, *one.model.module(), &one.optimizer);
          EXPECT_EQ(by_optimizer.at("state"), numbered.at("state"));
        }
        set_optimizer_state_dict(*plain, of_plain,
                                 rekey_optim_state_dict(numbered, OptimStateKeyType::param_name, *plain));
        EXPECT_EQ(get_optimizer_state_dict(*plain, of_plain).at("state"), named.at("state"));

        const StateDict given = rank0_only && group.rank() == 1 ? StateDict() : numbered;
        other.model.load_optim_state_dict(other.optimizer, given, {.rank0_only = rank0_only});
        EXPECT_EQ(other.full_optim().at("state"), named.at("state"));
        if (group.rank() == 0) numbered.at("state").get<Dict>()["head.bias"] = Dict();
        EXPECT_ERROR(other.model.load_optim_state_dict(other.optimizer, numbered, {.rank0_only = rank0_only}),
                     ErrorCode::invalid_argument, "both names and numbers");
      }
    }
  });
}

// PyTorch: test_optim_state_without_param_groups.
TEST(FsdpOptimizersTest, WithoutGroupsAnOptimizerKeepsItsOptions) {
  run_local(2, [](const ProcessGroup& group) {
    for (const Options& way : kWays) {
      for (const bool rank0_only : {true, false}) {
        WithOptimizer one(group, way, false);
        one.step(0);
        StateDict state = one.full_optim();
        const Value expected = state.at("state");
        state.erase("param_groups");
        const StateDict sharded = one.model.optim_state_dict(state, StateDictType::sharded);
        EXPECT_FALSE(sharded.contains("param_groups"));
        one.step(1);
        EXPECT_NE(one.full_optim().at("state"), expected);
        auto& options = static_cast<torch::optim::AdamWOptions&>(one.optimizer.param_groups()[0].options());
        options.lr(0.125);
        one.model.load_optim_state_dict(one.optimizer, rank0_only ? state : sharded, {.rank0_only = rank0_only});
        EXPECT_EQ(one.full_optim().at("state"), expected);
        EXPECT_EQ(options.lr(), 0.125);
      }
    }
  });
}

// PyTorch: the argument optim_state_dict of FullyShardedDataParallel.optim_state_dict; shard_full_optim_state_dict.
TEST(FsdpOptimizersTest, AStateThatWasChangedTakesAnotherForm) {
  run_local(2, [](const ProcessGroup& group) {
    for (const Options& way : kWays) {
      WithOptimizer one(group, way, false);
      one.step(0);
      const StateDict full = one.full_optim();
      StateDict doubled = full;
      for (const auto& [name, state] : full.at("state").get<Dict>()) {
        const Value twice = state.get<Dict>().at("exp_avg").get<at::Tensor>() * 2;
        doubled.at("state").get<Dict>().at(name).get<Dict>()["exp_avg"] = twice;
      }
      const StateDict sharded = one.model.optim_state_dict(doubled, StateDictType::sharded);
      const Value& value = sharded.at("state").get<Dict>().at("inner.bias").get<Dict>().at("exp_avg");
      EXPECT_EQ(value.is<std::shared_ptr<Checkpointable>>(), is_sharded(way.strategy));
      const StateDict rows =
          one.model.optim_state_dict(sharded, StateDictType::sharded, {.mesh = DeviceMesh::from_group(group)});
      for (const StateDict& state : {doubled, sharded, rows}) {
        EXPECT_EQ(one.model.optim_state_dict(state, StateDictType::full, {.rank0_only = false}), doubled);
        const StateDict of_rank_0 = one.model.optim_state_dict(state, StateDictType::full);
        EXPECT_EQ(of_rank_0, group.rank() == 0 ? doubled : StateDict());
      }
      EXPECT_EQ(one.full_optim(), full);
      one.model.load_optim_state_dict(one.optimizer, sharded);
      EXPECT_EQ(one.full_optim(), doubled);

      if (!is_sharded(way.strategy)) continue;
      StateDict wrong = doubled;
      if (group.rank() == 1) {
        wrong.at("state").get<Dict>().at("inner.bias").get<Dict>()["exp_avg"] = at::ones({2}, at::kDouble);
      }
      EXPECT_ERROR(one.model.optim_state_dict(wrong, StateDictType::full), ErrorCode::invalid_argument,
                   "'inner.bias' has shape [2], expected [5]");
      EXPECT_ERROR(one.model.optim_state_dict(StateDict{{"state", 3}}, StateDictType::full),
                   ErrorCode::invalid_argument, "expected a dict 'state'");
    }
  });
}

TEST(FsdpOptimizersTest, StateThatIsMissingIsAnErrorIfItIsStrict) {
  run_local(2, [](const ProcessGroup& group) {
    for (const Options& way : kWays) {
      WithOptimizer one(group, way, false), other(group, way, false);
      one.step(0);
      StateDict state = one.full_optim();
      for (const char* name : {"inner.bias", "head.weight", "head.bias"}) state.at("state").get<Dict>().erase(name);
      const StateDict before = other.full_optim();
      EXPECT_ERROR(other.model.load_optim_state_dict(other.optimizer, state), ErrorCode::invalid_argument,
                   "missing: ", "'inner.bias'");
      EXPECT_EQ(other.full_optim(), before);
      other.model.load_optim_state_dict(other.optimizer, state, {.rank0_only = false}, /*strict=*/false);
      EXPECT_EQ(other.exp_avg_of("inner.weight"), one.exp_avg_of("inner.weight"));
      EXPECT_EQ(other.exp_avg_of("inner.bias"), Value(at::zeros({5}, at::kDouble)));
      EXPECT_EQ(other.exp_avg_of("head.bias"), Value(at::zeros({3}, at::kDouble)));
      EXPECT_ERROR(other.model.load_optim_state_dict(other.optimizer, state, {.rank0_only = false},
                                                     /*strict=*/group.rank() == 0),
                   ErrorCode::invalid_argument, "strict");
    }
  });
}

struct WithScalarsImpl : torch::nn::Module {
  WithScalarsImpl() {
    before = register_parameter("before", at::full({}, 0.7));
    linear = register_module("linear", torch::nn::Linear(5, 3));
    const auto last = register_module("last", std::make_shared<torch::nn::Module>());
    after = last->register_parameter("after", at::full({}, 2.6));
  }
  at::Tensor forward(const at::Tensor& x) { return linear(x * before) * after; }
  at::Tensor before, after;
  torch::nn::Linear linear{nullptr};
};
TORCH_MODULE(WithScalars);

TEST(FsdpOptimizersTest, StatesOfScalarParametersLoadInEveryForm) {
  const auto make = [] {
    WithScalars model;
    fill(*model);
    return model;
  };
  for (const int ranks : {2, 3}) {
    WithScalars alone = make();
    torch::optim::AdamW expected(alone->parameters(), 0.02);
    for (int step = 0; step < 2; ++step) {
      backward_of_all(alone, {step}, ranks);
      expected.step();
    }
    run_local(ranks, [&](const ProcessGroup& group) {
      for (const Options& way : kWays) {
        FullyShardedDataParallel<WithScalars> model(make(), group, way);
        torch::optim::AdamW optimizer(model.parameters(), 0.02);
        const auto step = [&](auto& of, torch::optim::Optimizer& by, int index) {
          of.zero_grad();
          loss_of(of(batch_of(index, group.rank()))).backward();
          by.step();
        };
        step(model, optimizer, 0);
        const StateDict full = model.optim_state_dict(optimizer, StateDictType::full, {.rank0_only = false});
        const StateDict sharded = model.optim_state_dict(full, StateDictType::sharded);
        EXPECT_EQ(model.optim_state_dict(sharded, StateDictType::full, {.rank0_only = false}), full);
        const Value& scalar = sharded.at("state").get<Dict>().at("before").get<Dict>().at("exp_avg");
        EXPECT_EQ(scalar.is<std::shared_ptr<Checkpointable>>(), is_sharded(way.strategy));
        for (const StateDict& state : {full, sharded}) {
          FullyShardedDataParallel<WithScalars> again(make(), group, way);
          torch::optim::AdamW of_again(again.parameters(), 0.02);
          again.load_state_dict(model.state_dict());
          again.load_optim_state_dict(of_again, state);
          EXPECT_EQ(again.optim_state_dict(of_again, StateDictType::full, {.rank0_only = false}), full);
          step(again, of_again, 1);
          expect_equal_params(full_params(again), *alone);
        }
      }
    });
  }
}

}  // namespace
}  // namespace tessera::fsdp
