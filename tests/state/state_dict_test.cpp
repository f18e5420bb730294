// The options of state dicts, for models with plain parameters and with local tensors of DTensors.

#include "tessera/state/state_dict.h"

#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "state/names.h"
#include "state/optimizer_cases.h"
#include "state/parallel_mlp.h"
#include "support/error_matchers.h"
#include "tessera/base/error.h"
#include "tessera/base/function_ref.h"
#include "tessera/comm/local_ranks.h"
#include "tessera/state/internal/entries_of_rank0.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using testing::names_of;
using testing::parallel_mlp;
using testing::ParallelMlp;
namespace nn = torch::nn;
namespace optim = torch::optim;

// A model with an optimizer that has taken `steps` steps.
template <typename Optimizer = optim::Adam>
struct Training {
  explicit Training(ParallelMlp model_in, int steps = 0) : model(std::move(model_in)), optimizer(model->parameters()) {
    for (int i = 0; i < steps; ++i) testing::step(optimizer);
  }
  StateDicts state(const StateDictOptions& options = {}) { return get_state_dict(*model, {&optimizer}, options); }
  void set(const StateDicts& given, const StateDictOptions& options = {}) {
    set_state_dict(*model, {&optimizer}, given.model, given.optimizer, options);
  }

  ParallelMlp model;
  Optimizer optimizer;
};

bool operator==(const StateDicts& a, const StateDicts& b) { return a.model == b.model && a.optimizer == b.optimizer; }

Dict copy_of(const Dict& dict) {
  Dict copy;
  for (const auto& [key, value] : dict) {
    const auto* tensor = value.get_if<at::Tensor>();
    const auto* inner = value.get_if<Dict>();
    copy[key] = tensor ? Value(tensor->clone()) : inner ? Value(copy_of(*inner)) : value;
  }
  return copy;
}
StateDicts copy_of(const StateDicts& states) { return {copy_of(states.model), copy_of(states.optimizer)}; }

StateDictOptions full_of(const ProcessGroup& group) {
  StateDictOptions options;
  options.group = group;
  options.full_state_dict = true;
  return options;
}

StateDictOptions from_rank0(const ProcessGroup& group) {
  StateDictOptions options = full_of(group);
  options.broadcast_from_rank0 = true;
  return options;
}

// Calls `f` on meshes of one dimension and, with the group of all ranks, on those of a second one.
void on_meshes(FunctionRef<void(const ProcessGroup& group, const DeviceMesh& mesh)> f) {
  for (const int ranks : {1, 2, 3}) {
    run_local(ranks, [&](const ProcessGroup& group) { f(group, DeviceMesh(group, {ranks})); });
  }
  run_local(4, [&](const ProcessGroup& group) { f(group, DeviceMesh(group, {2, 2}, {"dp", "tp"})["tp"]); });
}

TEST(FullStateDictTest, IsThatOfAModelThatIsNotParallelized) {
  const StateDicts expected = Training(ParallelMlp(), 2).state();
  on_meshes([&](const ProcessGroup& group, const DeviceMesh& mesh) {
    Training training(parallel_mlp(mesh), 2);
    EXPECT_TRUE(training.state(full_of(group)) == expected);
    EXPECT_EQ(Value(get_model_state_dict(*training.model, full_of(group))), Value(expected.model));
    EXPECT_EQ(Value(get_optimizer_state_dict(*training.model, training.optimizer, full_of(group))),
              Value(expected.optimizer));
    EXPECT_EQ(training.state().model.at("up.weight").kind(), ValueKind::checkpointable);
  });
}

TEST(FullStateDictTest, WithCpuOffloadOnlyRank0GetsIt) {
  const StateDicts expected = Training(ParallelMlp(), 1).state();
  on_meshes([&](const ProcessGroup& group, const DeviceMesh& mesh) {
    StateDictOptions options = full_of(group);
    options.cpu_offload = true;
    EXPECT_TRUE(Training(parallel_mlp(mesh), 1).state(options) == (group.rank() == 0 ? expected : StateDicts()));
  });
}

TEST(FullStateDictTest, WithoutFullStateDictCpuOffloadKeepsTheParts) {
  run_local(2, [](const ProcessGroup& group) {
    Training training(parallel_mlp(DeviceMesh(group, {2})), 1);
    StateDictOptions options;
    options.cpu_offload = true;
    training.set(training.state(options));
    EXPECT_TRUE(training.state(full_of(group)) == Training(ParallelMlp(), 1).state());
  });
}

TEST(FullStateDictTest, IsSetOnAnyMesh) {
  const StateDicts given = Training(ParallelMlp(), 2).state();
  on_meshes([&](const ProcessGroup& group, const DeviceMesh& mesh) {
    Training training(parallel_mlp(mesh));
    training.set(given, full_of(group));
    EXPECT_TRUE(training.state(full_of(group)) == given);
  });
}

TEST(FullStateDictTest, AGroupWithoutAllRanksOfAMeshIsAnError) {
  run_local(2, [](const ProcessGroup& group) {
    const ParallelMlp model = parallel_mlp(DeviceMesh(group, {2}));
    EXPECT_ERROR(get_model_state_dict(*model, full_of(ProcessGroup())), ErrorCode::invalid_argument,
                 "'model.up.weight'", "pass the group of all ranks");
  });
}

TEST(BroadcastFromRank0Test, AllRanksTakeTheFullStateOfRank0) {
  const StateDicts given = Training(ParallelMlp(), 2).state();
  on_meshes([&](const ProcessGroup& group, const DeviceMesh& mesh) {
    for (const bool flatten : {false, true}) {
      StateDicts sent = given;
      if (flatten) {
        Training source(ParallelMlp(), 2);
        StateDictOptions options;
        options.flatten_optimizer_state_dict = true;
        sent.optimizer = copy_of(source.state(options)).optimizer;
      }
      Training training(parallel_mlp(mesh));
      training.set(group.rank() == 0 ? sent : StateDicts(), from_rank0(group));
      EXPECT_TRUE(training.state(full_of(group)) == given);
    }
  });
}

TEST(BroadcastFromRank0Test, OtherRanksStatesAreIgnored) {
  run_local(2, [](const ProcessGroup& group) {
    ParallelMlp model;
    StateDict state = get_model_state_dict(*model);
    state["up.bias"] = at::full({5}, 7.0 + group.rank(), at::kFloat);
    if (group.rank() == 1) state["unknown"] = 3;
    set_model_state_dict(*model, state, from_rank0(group));
    EXPECT_EQ(get_model_state_dict(*model).at("up.bias"), Value(at::full({5}, 7.0F)));
  });
}

TEST(BroadcastFromRank0Test, OfAViewOnlyItsElementsAreSent) {
  run_local(2, [](const ProcessGroup& group) {
    const at::Tensor buffer = at::full({4096}, 7.0F);
    Dict dict;
    if (group.rank() == 0) dict = {{"a", buffer.narrow(0, 10, 3)}, {"b", Dict{{"c", buffer.narrow(0, 20, 3)}}}};
    std::size_t count = 0;
    for_each_entry_of_rank0(dict, group, [&](const Key&, const Value& value) {
      const auto* inner = value.get_if<Dict>();
      const at::Tensor tensor = (inner != nullptr ? inner->at("c") : value).get<at::Tensor>();
      EXPECT_TRUE(at::equal(tensor, at::full({3}, 7.0F)));
      EXPECT_EQ(tensor.storage().nbytes(), group.rank() == 0 ? buffer.nbytes() : tensor.nbytes());
      ++count;
    });
    EXPECT_EQ(count, 2U);
  });
}

TEST(BroadcastFromRank0Test, WhatIsWrongOnRank0IsAnErrorOnAllRanks) {
  run_local(2, [](const ProcessGroup& group) {
    Training training(parallel_mlp(DeviceMesh(group, {2})));
    const StateDicts sharded = training.state();
    EXPECT_ERROR(training.set(sharded, from_rank0(group)), ErrorCode::unsupported, "send a state", "rank 0",
                 "'up.weight'");
    StateDicts full = training.state(full_of(group));
    full.model.erase("up.bias");
    full.model["down.bias"] = at::zeros({7});
    EXPECT_ERROR(training.set(full, from_rank0(group)), ErrorCode::invalid_argument, "rank 0", "rank 1",
                 "missing: 'up.bias'", "'down.bias' is [7], expected [6]");
    StateDictOptions options = from_rank0(group);
    options.full_state_dict = false;
    EXPECT_ERROR(training.set(full, options), ErrorCode::invalid_argument, "set state dict",
                 "broadcast_from_rank0 is set and full_state_dict is not");
  });
}

TEST(IgnoreFrozenParamsTest, FrozenParametersAreLeftOutAndMayBeMissing) {
  ParallelMlp model;
  model->up->bias.requires_grad_(false);
  model->norm->weight.requires_grad_(false);
  StateDictOptions options;
  options.ignore_frozen_params = true;
  StateDict state = get_model_state_dict(*model, options);
  EXPECT_THAT(names_of(state), ElementsAre("norm.bias", "norm.running_mean", "norm.running_var",
                                           "norm.num_batches_tracked", "up.weight", "down.weight", "down.bias"));
  EXPECT_TRUE(set_model_state_dict(*model, state, options).missing.empty());
  EXPECT_ERROR(set_model_state_dict(*model, state), ErrorCode::invalid_argument, "missing: 'norm.weight', 'up.bias'");
  state.erase("down.bias");
  EXPECT_ERROR(set_model_state_dict(*model, state, options), ErrorCode::invalid_argument, "missing: 'down.bias'");
  state["down.bias"] = model->down->bias.detach();
  state["up.bias"] = at::full({5}, 9.0F);
  set_model_state_dict(*model, state, options);
  EXPECT_EQ(Value(model->up->bias.detach()), Value(at::full({5}, 9.0F)));
}

TEST(SubmodulesTest, OnlyTheirTensorsAreInTheState) {
  ParallelMlp model;
  StateDictOptions options;
  options.submodules = {model->down.ptr(), model->norm.ptr()};
  const StateDict state = get_model_state_dict(*model, options);
  EXPECT_THAT(names_of(state), ElementsAre("norm.weight", "norm.bias", "norm.running_mean", "norm.running_var",
                                           "norm.num_batches_tracked", "down.weight", "down.bias"));
  EXPECT_TRUE(set_model_state_dict(*model, state, options).missing.empty());
  EXPECT_ERROR(set_model_state_dict(*model, {{"norm.weight", at::zeros({6})}}, options), ErrorCode::invalid_argument,
               "missing: 'norm.bias'", "'down.bias'");
  options.submodules = {model.ptr()};
  EXPECT_EQ(get_model_state_dict(*model, options).size(), 9U);
}

TEST(SubmodulesTest, NamesBeginAtTheSubmoduleWithoutPrefixes) {
  ParallelMlp model;
  StateDictOptions options;
  options.submodules = {model->down.ptr()};
  options.keep_submodule_prefixes = false;
  StateDict state = get_model_state_dict(*model, options);
  EXPECT_THAT(names_of(state), ElementsAre("weight", "bias"));
  state["bias"] = at::full({6}, 9.0F);
  set_model_state_dict(*model, state, options);
  EXPECT_EQ(Value(model->down->bias.detach()), Value(at::full({6}, 9.0F)));
  state["up.bias"] = at::zeros({5});
  EXPECT_ERROR(set_model_state_dict(*model, state, options), ErrorCode::invalid_argument, "unexpected: 'up.bias'");
  options.submodules.push_back(model->up.ptr());
  EXPECT_ERROR(get_model_state_dict(*model, options), ErrorCode::invalid_argument,
               "two tensors have the name 'weight'");
}

TEST(SubmodulesTest, AModuleOutsideOfTheModelIsAnError) {
  ParallelMlp model, other;
  for (const std::shared_ptr<nn::Module>& module : {std::shared_ptr<nn::Module>(other->up.ptr()), {}}) {
    StateDictOptions options;
    options.submodules = {model->up.ptr(), module};
    EXPECT_ERROR(get_model_state_dict(*model, options), ErrorCode::invalid_argument,
                 "submodule 1 of the options is not in the model");
  }
}

StateDictOptions flattened() {
  StateDictOptions options;
  options.flatten_optimizer_state_dict = true;
  return options;
}

TEST(FlattenOptimizerStateDictTest, EachParameterHasEntriesOfItsOwn) {
  nn::Linear linear(2, 1);
  optim::SGD optimizer(linear->parameters(), optim::SGDOptions(0.5).momentum(0.9));
  testing::step(optimizer);
  const StateDict flat = get_optimizer_state_dict(*linear, optimizer, flattened());
  EXPECT_THAT(
      names_of(flat),
      ElementsAre("state.weight.momentum_buffer", "state.bias.momentum_buffer", "param_groups.weight.lr",
                  "param_groups.weight.momentum", "param_groups.weight.dampening", "param_groups.weight.weight_decay",
                  "param_groups.weight.nesterov", "param_groups.weight.maximize", "param_groups.weight.foreach",
                  "param_groups.weight.differentiable", "param_groups.weight.fused", "param_groups.bias.lr",
                  "param_groups.bias.momentum", "param_groups.bias.dampening", "param_groups.bias.weight_decay",
                  "param_groups.bias.nesterov", "param_groups.bias.maximize", "param_groups.bias.foreach",
                  "param_groups.bias.differentiable", "param_groups.bias.fused"));
  EXPECT_EQ(flat.at("param_groups.bias.lr"), Value(0.5));
  EXPECT_EQ(flat.at("state.weight.momentum_buffer"), get_optimizer_state_dict(*linear, optimizer)
                                                         .at("state")
                                                         .get<Dict>()
                                                         .at("weight")
                                                         .get<Dict>()
                                                         .at("momentum_buffer"));
}

TEST(FlattenOptimizerStateDictTest, IsSetInItsGroups) {
  for (const char* name : {"sgd", "sgd_momentum", "adam", "adagrad", "rmsprop_centered"}) {
    nn::Sequential model = testing::make_model(), other = testing::make_model();
    const auto trained = testing::make_optimizer(name, model), fresh = testing::make_other(name, other);
    testing::step(model, *trained);
    set_optimizer_state_dict(*other, *fresh, get_optimizer_state_dict(*model, *trained, flattened()));
    EXPECT_EQ(Value(get_optimizer_state_dict(*other, *fresh)), Value(get_optimizer_state_dict(*model, *trained)))
        << name;
  }
}

TEST(FlattenOptimizerStateDictTest, WhatDoesNotFitIsAnErrorThatNamesTheParameter) {
  nn::Sequential model = testing::make_model();
  const auto optimizer = testing::make_optimizer("adam", model);
  const StateDict good = get_optimizer_state_dict(*model, *optimizer, flattened());
  StateDict flat = good;
  flat["param_groups.0.bias.lr"] = 0.75;
  EXPECT_ERROR(set_optimizer_state_dict(*model, *optimizer, flat), ErrorCode::invalid_argument,
               "parameters '0.weight' and '0.bias' of group 0 have different options");
  flat = good;
  flat.erase("param_groups.2.weight.eps");
  flat.erase("param_groups.2.bias.eps");
  flat.erase("state.0.bias.exp_avg");
  EXPECT_ERROR(set_optimizer_state_dict(*model, *optimizer, flat), ErrorCode::invalid_argument, "'eps' of group 1",
               "'exp_avg' of parameter '0.bias'");
  EXPECT_ERROR(set_optimizer_state_dict(*model, *optimizer, {{"state.0.bias.step", 3}}), ErrorCode::invalid_argument,
               "missing: parameter '0.weight' in param_groups");
}

TEST(FlattenOptimizerStateDictTest, ListsAreAnError) {
  nn::Sequential model = testing::make_model();
  const auto optimizer = testing::make_optimizer("lbfgs", model);
  testing::step(model, *optimizer);
  EXPECT_ERROR(get_optimizer_state_dict(*model, *optimizer, flattened()), ErrorCode::unsupported,
               "flatten optimizer state dict: 'state.0.weight.old_dirs' is list");
}

TEST(SeveralOptimizersTest, HaveOneStateDict) {
  for (const bool flatten : {false, true}) {
    ParallelMlp model, other;
    const auto up = [](ParallelMlp& of) { return optim::Adam(of->up->parameters(), optim::AdamOptions(0.5)); };
    const auto down = [](ParallelMlp& of) { return optim::SGD(of->down->parameters(), optim::SGDOptions(0.25)); };
    optim::Adam adam = up(model), other_adam = up(other);
    optim::SGD sgd = down(model), other_sgd = down(other);
    for (int i = 0; i < 2; ++i) testing::step(adam);
    StateDictOptions options;
    options.flatten_optimizer_state_dict = flatten;
    const StateDict state = get_optimizer_state_dict(*model, {&adam, &sgd}, options);
    set_optimizer_state_dict(*other, {&other_adam, &other_sgd}, state, options);
    EXPECT_EQ(Value(get_optimizer_state_dict(*other, {&other_adam, &other_sgd}, options)), Value(state));
    EXPECT_ERROR(get_optimizer_state_dict(*model, {&adam, nullptr}), ErrorCode::invalid_argument,
                 "optimizer 1 is null");
  }
}

TEST(SeveralOptimizersTest, OneBeforeItsFirstStepIsSetNextToOneWithState) {
  ParallelMlp model;
  optim::Adam adam(model->up->parameters(), optim::AdamOptions(0.5));
  optim::LBFGS lbfgs(model->down->parameters(), optim::LBFGSOptions(0.25));
  testing::step(adam);
  StateDict state = get_optimizer_state_dict(*model, {&adam, &lbfgs});
  set_optimizer_state_dict(*model, {&adam, &lbfgs}, state);
  EXPECT_TRUE(lbfgs.state().empty());
  EXPECT_EQ(get_optimizer_state_dict(*model, {&adam, &lbfgs}), state);
  state.at("state").get<Dict>().erase("up.bias");
  EXPECT_ERROR(set_optimizer_state_dict(*model, {&adam, &lbfgs}, state), ErrorCode::invalid_argument,
               "load optimizer state dict (Adam): missing: the state of parameter 'up.bias'");
}

TEST(SeveralOptimizersTest, OneBeforeItsFirstStepIsSetNextToOneWithFlattenedState) {
  ParallelMlp model;
  optim::Adam adam(model->up->parameters(), optim::AdamOptions(0.5));
  optim::Adam other(model->down->parameters(), optim::AdamOptions(0.25));
  testing::step(adam);
  StateDict state = get_optimizer_state_dict(*model, {&adam, &other}, flattened());
  for (const auto& [key, value] : StateDict(state)) {
    if (std::get<std::string>(key).starts_with("state.down.")) state.erase(key);
  }
  testing::step(other);
  set_optimizer_state_dict(*model, {&adam, &other}, state);
  EXPECT_TRUE(other.state().empty());
  EXPECT_FALSE(adam.state().empty());
}

// The weights and the biases in groups of their own, in either order.
optim::Adam in_two_groups(const ParallelMlp& model, bool weights_first, double lr_of_weights, double lr_of_biases) {
  std::vector<at::Tensor> weights, biases;
  for (const auto& parameter : model->named_parameters()) {
    (parameter.key().ends_with("weight") ? weights : biases).push_back(parameter.value());
  }
  const auto group_of = [](const std::vector<at::Tensor>& parameters, double lr) {
    return optim::OptimizerParamGroup(parameters, std::make_unique<optim::AdamOptions>(lr));
  };
  std::vector<optim::OptimizerParamGroup> groups;
  groups.push_back(group_of(weights_first ? weights : biases, weights_first ? lr_of_weights : lr_of_biases));
  groups.push_back(group_of(weights_first ? biases : weights, weights_first ? lr_of_biases : lr_of_weights));
  return optim::Adam(groups, optim::AdamOptions(7));
}

// PyTorch: test_multi_param_groups.
TEST(SeveralGroupsTest, OfAParallelModelAreFoundByTheirParametersOnAnyMesh) {
  ParallelMlp alone;
  optim::Adam optimizer_alone = in_two_groups(alone, true, 0.125, 0.25);
  for (int i = 0; i < 2; ++i) testing::step(optimizer_alone);
  for (const bool flatten : {false, true}) {
    StateDictOptions options_alone;
    options_alone.flatten_optimizer_state_dict = flatten;
    const StateDict full = get_optimizer_state_dict(*alone, optimizer_alone, options_alone);
    for (const std::vector<std::int64_t>& shape : {std::vector<std::int64_t>{1}, {3}, {2, 2}}) {
      run_local(shape.size() == 2 ? 4 : static_cast<int>(shape[0]), [&](const ProcessGroup& group) {
        StateDictOptions options = full_of(group);
        options.flatten_optimizer_state_dict = flatten;
        ParallelMlp model = parallel_mlp(testing::tensor_parallel_mesh(group, shape));
        for (const bool weights_first : {true, false}) {
          optim::Adam optimizer = in_two_groups(model, weights_first, 3, 4);
          set_optimizer_state_dict(*model, optimizer, full);
          const StateDict state = get_optimizer_state_dict(*model, optimizer, options);
          if (flatten || weights_first) {
            EXPECT_EQ(state, full);
          } else {
            EXPECT_EQ(state.at("state"), full.at("state"));
            EXPECT_EQ(state.at("param_groups").get<List>()[0], full.at("param_groups").get<List>()[1]);
            EXPECT_EQ(state.at("param_groups").get<List>()[1], full.at("param_groups").get<List>()[0]);
          }
          // Its own parts, too, in the other order of groups.
          optim::Adam other = in_two_groups(model, !weights_first, 5, 6);
          StateDictOptions parts;
          parts.group = group;
          parts.flatten_optimizer_state_dict = flatten;
          set_optimizer_state_dict(*model, other, get_optimizer_state_dict(*model, optimizer, parts), parts);
          const double lr = static_cast<optim::AdamOptions&>(other.param_groups()[0].options()).lr();
          EXPECT_EQ(lr, weights_first ? 0.25 : 0.125);
          if (flatten) {
            EXPECT_EQ(get_optimizer_state_dict(*model, other, options), full);
          }
        }
      });
    }
  }
}

TEST(SetStateDictTest, IfOnePartDoesNotFitNothingIsChanged) {
  Training training(ParallelMlp(), 1);
  const StateDicts before = copy_of(training.state());
  StateDicts other = copy_of(Training(ParallelMlp(), 2).state());
  StateDicts bad = other;
  bad.optimizer.at("state").get<Dict>().erase("up.bias");
  EXPECT_ERROR(training.set(bad), ErrorCode::invalid_argument, "the state of parameter 'up.bias'");
  bad = other;
  bad.model.erase("up.bias");
  EXPECT_ERROR(training.set(bad), ErrorCode::invalid_argument, "missing: 'up.bias'");
  EXPECT_TRUE(training.state() == before);
  training.set(other);
  EXPECT_TRUE(training.state() == other);
}

TEST(SetStateDictTest, IfOneRankRefusesNoRankIsChanged) {
  on_meshes([](const ProcessGroup& group, const DeviceMesh& mesh) {
    if (group.size() == 1) return;
    Training training(parallel_mlp(mesh), 1);
    const StateDicts before = copy_of(training.state(full_of(group)));
    const StateDicts good = copy_of(Training(ParallelMlp(), 2).state());
    StateDicts given = good;
    if (group.rank() == 1) given.model.erase("up.bias");
    EXPECT_ERROR(training.set(given, full_of(group)), ErrorCode::invalid_argument, "set state dict", "rank 1",
                 "missing: 'up.bias'");
    StateDictOptions options = full_of(group);
    options.confirm = [&] {
      if (group.rank() == 0) fail(ErrorCode::cancelled, "not now");
    };
    EXPECT_ERROR(training.set(good, options), ErrorCode::cancelled, "set state dict", "rank 0", "not now");
    EXPECT_TRUE(training.state(full_of(group)) == before);
  });
}

}  // namespace
}  // namespace tessera
