#include "tessera/state/optimizer_state.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn.h>
#include <torch/optim.h>

#include "state/golden_values.h"
#include "state/optimizer_cases.h"
#include "support/error_matchers.h"
#include "support/golden.h"
#include "tessera/state/object_archive.h"

namespace tessera {
namespace {

namespace nn = torch::nn;
namespace optim = torch::optim;
using testing::close;
using testing::make_model;
using testing::make_optimizer;
using testing::make_other;
using testing::OptimizerPtr;
using testing::step;

StateDict without(StateDict state, const Key& key) {
  state.erase(key);
  return state;
}

// Returns copies of Python's state, without LBFGS's scratch values.
StateDict saved_optimizer(const Dict& saved) {
  StateDict state = saved.at("optim").get<Dict>();
  for (const auto& [name, entry] : Dict(state.at("state").get<Dict>())) {
    state.at("state").get<Dict>()[name] = without(entry.get<Dict>(), "al");
  }
  return state;
}

std::vector<Key> keys_of(const Value& value) {
  std::vector<Key> keys;
  for (const auto& [key, member] : value.get<Dict>()) keys.push_back(key);
  return keys;
}

class OptimizerGoldenTest : public ::testing::TestWithParam<std::tuple<const char*, const char*>> {
 protected:
  std::string version() const { return std::get<0>(GetParam()); }
  std::string name() const { return std::get<1>(GetParam()); }
  Dict saved() const {
    const std::string file = version() + "-optimizers.pt";
    return load_object(read_file(testing::state_golden(file)), file).get<Dict>().at(name()).get<Dict>();
  }
  static const StateDict& part(const Dict& saved, const char* name) { return saved.at(name).get<Dict>(); }
};
INSTANTIATE_TEST_SUITE_P(PyTorch, OptimizerGoldenTest,
                         ::testing::Combine(::testing::Values("2.6", "2.14"),
                                            ::testing::Values("sgd", "sgd_momentum", "sgd_nesterov", "adam",
                                                              "adam_amsgrad", "adamw", "adagrad", "rmsprop",
                                                              "rmsprop_centered", "lbfgs")),
                         [](const auto& instance) {
                           return testing::test_name(std::get<0>(instance.param)) + "_" + std::get<1>(instance.param);
                         });

TEST_P(OptimizerGoldenTest, WhatPythonSavedIsLoadedAndTheNextStepIsPythons) {
  const Dict saved = this->saved();
  nn::Sequential model = make_model();
  set_model_state_dict(*model, part(saved, "model"));
  const OptimizerPtr optimizer = make_other(name(), model);
  set_optimizer_state_dict(*model, *optimizer, part(saved, "optim"));
  step(model, *optimizer);
  EXPECT_TRUE(close(get_model_state_dict(*model), saved.at("after")));
}

TEST_P(OptimizerGoldenTest, AfterTheSameStepsTheStateIsPythons) {
  const Dict saved = this->saved();
  nn::Sequential model = make_model();
  set_model_state_dict(*model, part(saved, "initial"));
  const OptimizerPtr optimizer = make_optimizer(name(), model);
  step(model, *optimizer);
  step(model, *optimizer);
  EXPECT_TRUE(close(get_model_state_dict(*model), saved.at("model")));
  EXPECT_TRUE(close(get_optimizer_state_dict(*model, *optimizer), saved_optimizer(saved)));
}

TEST_P(OptimizerGoldenTest, KeysAndTheirOrderAreThoseOfPython) {
  const Dict saved = this->saved();
  nn::Sequential model = make_model();
  const OptimizerPtr optimizer = make_other(name(), model);
  set_optimizer_state_dict(*model, *optimizer, part(saved, "optim"));
  const StateDict ours = get_optimizer_state_dict(*model, *optimizer);
  const StateDict theirs = saved_optimizer(saved);
  EXPECT_EQ(keys_of(ours), keys_of(theirs));
  EXPECT_EQ(keys_of(ours.at("state")), keys_of(theirs.at("state")));
  for (const auto& [parameter, state] : ours.at("state").get<Dict>()) {
    EXPECT_EQ(keys_of(state), keys_of(theirs.at("state").get<Dict>().at(parameter)));
  }
  if (version() != "2.14") return;  // older versions lack options added since
  const auto& groups = ours.at("param_groups").get<List>();
  for (std::size_t g = 0; g < groups.size(); ++g) {
    EXPECT_EQ(keys_of(groups[g]), keys_of(theirs.at("param_groups").get<List>()[g]));
  }
}

TEST_P(OptimizerGoldenTest, FlattenedItIsPythonsAndIsLoaded) {
  if (name() == "lbfgs") return;  // it cannot be flattened
  const Dict saved = this->saved();
  const std::string file = version() + "-flattened.pt";
  const Dict theirs = load_object(read_file(testing::state_golden(file)), file).get<Dict>().at(name()).get<Dict>();
  StateDictOptions flat;
  flat.flatten_optimizer_state_dict = true;
  nn::Sequential model = make_model();
  const OptimizerPtr first = make_other(name(), model), second = make_other(name(), model);
  set_optimizer_state_dict(*model, *first, part(saved, "optim"));
  const StateDict ours = get_optimizer_state_dict(*model, *first, flat);
  EXPECT_TRUE(close(ours, theirs));
  if (version() == "2.14") {  // older versions lack options added since
    EXPECT_EQ(keys_of(ours), keys_of(theirs));
  }
  set_optimizer_state_dict(*model, *second, theirs, flat);
  EXPECT_EQ(Value(get_optimizer_state_dict(*model, *second)), Value(get_optimizer_state_dict(*model, *first)));
}

TEST_P(OptimizerGoldenTest, SetIsTheInverseOfGet) {
  const Dict saved = this->saved();
  nn::Sequential model = make_model();
  const OptimizerPtr first = make_other(name(), model), second = make_other(name(), model);
  set_optimizer_state_dict(*model, *first, part(saved, "optim"));
  const StateDict state = get_optimizer_state_dict(*model, *first);
  set_optimizer_state_dict(*model, *second, state);
  EXPECT_EQ(Value(get_optimizer_state_dict(*model, *second)), Value(state));
}

TEST_P(OptimizerGoldenTest, AStateThatNobodyHasYetIsOneThatChangesNothing) {
  if (name() == "sgd_momentum") return;  // its first step is not dampened
  const Dict saved = this->saved();
  nn::Sequential model = make_model(), other = make_model();
  for (nn::Sequential* each : {&model, &other}) set_model_state_dict(**each, part(saved, "model"));
  const OptimizerPtr fresh = make_optimizer(name(), model), loaded = make_optimizer(name(), other);
  set_optimizer_state_dict(*other, *loaded, get_optimizer_state_dict(*model, *fresh));
  step(model, *fresh);
  step(other, *loaded);
  EXPECT_EQ(Value(get_model_state_dict(*model)), Value(get_model_state_dict(*other)));
  EXPECT_EQ(Value(get_optimizer_state_dict(*model, *fresh)), Value(get_optimizer_state_dict(*other, *loaded)));
}

// A model with an Adam optimizer after one step.
struct Trained {
  nn::Sequential model = make_model();
  OptimizerPtr optimizer = make_optimizer("adam", model);
  Trained() { step(model, *optimizer); }
  StateDict state() const { return get_optimizer_state_dict(*model, *optimizer); }
  // Copies of the tensors, which tests modify.
  StateDict copy() const { return load_object(save_object(state()), "copy").get<Dict>(); }
  void set(const StateDict& state, bool strict = true) {
    set_optimizer_state_dict(*model, *optimizer, state, {.strict = strict});
  }
};

Dict& state_of(StateDict& state, const char* parameter) {
  return get_element(state, {"state", parameter})->get<Dict>();
}
Dict& group_of(StateDict& state, std::int64_t g) { return get_element(state, {"param_groups", g})->get<Dict>(); }

TEST(OptimizerStateDictTest, LooksAsInPython) {
  const Trained trained;
  const StateDict state = trained.state();
  const Dict& weight = require_element<Dict>(state, {"state", "0.weight"});
  const auto& step = weight.at("step").get<at::Tensor>();
  EXPECT_EQ(step.scalar_type(), at::kFloat);
  EXPECT_EQ(step.dim(), 0);
  EXPECT_EQ(step.item<float>(), 1);
  EXPECT_EQ(weight.at("exp_avg").get<at::Tensor>().sizes(), (at::IntArrayRef{2, 3}));
  EXPECT_EQ(require_element<List>(state, {"param_groups", 1, "params"}), (List{"2.weight", "2.bias"}));
  EXPECT_EQ(require_element<double>(state, {"param_groups", 1, "lr"}), 0.02);
  EXPECT_EQ(require_element<Tuple>(state, {"param_groups", 0, "betas"}), (Tuple{0.8, 0.99}));
  EXPECT_EQ(require_element<bool>(state, {"param_groups", 0, "decoupled_weight_decay"}), false);
  EXPECT_TRUE(get_element(state, {"param_groups", 0, "foreach"})->is_none());
}

TEST(OptimizerStateDictTest, TensorsAreTheOptimizersOwn) {
  Trained trained;
  trained.state().at("state").get<Dict>().at("0.bias").get<Dict>().at("exp_avg").get<at::Tensor>().fill_(5);
  const StateDict state = trained.state();
  EXPECT_EQ(require_element<at::Tensor>(state, {"state", "0.bias", "exp_avg"})[0].item<float>(), 5);
}

TEST(OptimizerStateDictTest, ParametersWithoutStateHaveTheOneTheyBeginWithAndTheOptimizerIsNotChanged) {
  nn::Sequential model = make_model();
  model->ptr(0)->parameters()[0].set_requires_grad(false);
  const OptimizerPtr optimizer = make_optimizer("adam_amsgrad", model);
  const StateDict state = get_optimizer_state_dict(*model, *optimizer);
  EXPECT_TRUE(optimizer->state().empty());
  EXPECT_EQ(get_element(state, {"state", "0.weight"}), nullptr);
  EXPECT_EQ(require_element<at::Tensor>(state, {"state", "2.weight", "step"}).item<float>(), 0);
  EXPECT_EQ(Value(*get_element(state, {"state", "2.weight", "max_exp_avg_sq"})), Value(at::zeros({1, 2})));
}

TEST(OptimizerStateDictTest, AStepThatFloat32WouldRoundIsFloat64) {
  Trained trained;
  StateDict state = trained.copy();
  for (const std::int64_t count : {std::int64_t{1} << 24, (std::int64_t{1} << 24) + 1}) {
    state_of(state, "0.weight")["step"] = count;
    trained.set(state);
    const StateDict ours = trained.state();
    const auto& step = require_element<at::Tensor>(ours, {"state", "0.weight", "step"});
    EXPECT_EQ(step.item<double>(), static_cast<double>(count));
    EXPECT_EQ(step.scalar_type(), count == std::int64_t{1} << 24 ? at::kFloat : at::kDouble);
  }
}

TEST(OptimizerStateDictTest, AParameterOfNoModuleIsAnErrorThatSaysWhere) {
  const nn::Sequential model = make_model();
  optim::SGD optimizer({model->parameters()[0], torch::zeros({1}).set_requires_grad(true)}, optim::SGDOptions(0.1));
  EXPECT_ERROR(get_optimizer_state_dict(*model, optimizer), ErrorCode::invalid_argument, "parameter 1 of group 0");
}

TEST(OptimizerStateDictTest, AnUnknownClassIsUnsupported) {
  struct Other : optim::Optimizer {
    using optim::Optimizer::Optimizer;
    at::Tensor step(LossClosure) override { return {}; }
  };
  const nn::Sequential model = make_model();
  const Other optimizer(model->parameters(), std::make_unique<optim::SGDOptions>(0.1));
  EXPECT_ERROR(get_optimizer_state_dict(*model, optimizer), ErrorCode::unsupported, "Other", "AdamW");
}

TEST(SetOptimizerStateDictTest, SharesNothingWithTheState) {
  Trained trained;
  const StateDict state = trained.copy();
  trained.set(state);
  require_element<at::Tensor>(state, {"state", "0.bias", "exp_avg"}).fill_(5);
  const StateDict ours = trained.state();
  EXPECT_NE(require_element<at::Tensor>(ours, {"state", "0.bias", "exp_avg"})[0].item<float>(), 5);
}

TEST(SetOptimizerStateDictTest, TakesTensorsOverIfTold) {
  Trained trained;
  const StateDict state = trained.copy();
  const void* data = require_element<at::Tensor>(state, {"state", "0.bias", "exp_avg"}).data_ptr();
  set_optimizer_state_dict(*trained.model, *trained.optimizer, state, {.take_tensors = true});
  const StateDict ours = trained.state();
  EXPECT_EQ(require_element<at::Tensor>(ours, {"state", "0.bias", "exp_avg"}).data_ptr(), data);
}

TEST(SetOptimizerStateDictTest, ConvertsToTheParametersDtype) {
  Trained trained;
  StateDict state = trained.copy();
  state_of(state, "0.bias")["exp_avg"] = at::full({2}, 0.5, at::kDouble);
  trained.set(state);
  const StateDict ours = trained.state();
  EXPECT_EQ(Value(*get_element(ours, {"state", "0.bias", "exp_avg"})), Value(at::full({2}, 0.5F)));
}

TEST(SetOptimizerStateDictTest, AStateOfNobodyMakesAnOptimizerBeforeItsFirstStep) {
  Trained trained;
  StateDict state = trained.copy();
  state["state"] = Dict();
  trained.set(state);
  EXPECT_TRUE(trained.optimizer->state().empty());
}

TEST(SetOptimizerStateDictTest, AnAdagradBeforeItsFirstStepCanStep) {
  nn::Sequential model = make_model(), other = make_model();
  set_model_state_dict(*other, get_model_state_dict(*model));
  const OptimizerPtr fresh = make_optimizer("adagrad", model), used = make_optimizer("adagrad", other);
  StateDict state = get_optimizer_state_dict(*model, *fresh);
  step(other, *used);
  set_model_state_dict(*other, get_model_state_dict(*model));
  state["state"] = Dict();
  set_optimizer_state_dict(*other, *used, state);
  EXPECT_EQ(Value(get_optimizer_state_dict(*other, *used)), Value(get_optimizer_state_dict(*model, *fresh)));
  const OptimizerPtr empty = make_optimizer("adagrad", model);
  empty->state().clear();
  EXPECT_EQ(Value(get_optimizer_state_dict(*model, *empty)), Value(get_optimizer_state_dict(*model, *fresh)));
  step(model, *fresh);
  step(other, *used);
  EXPECT_EQ(Value(get_model_state_dict(*other)), Value(get_model_state_dict(*model)));
}

TEST(SetOptimizerStateDictTest, ParametersThatKeepNothingNeedNoState) {
  nn::Sequential model = make_model();
  std::vector<optim::OptimizerParamGroup> groups;
  groups.emplace_back(model->ptr(0)->parameters(),
                      std::make_unique<optim::SGDOptions>(optim::SGDOptions(0.1).momentum(0.9)));
  groups.emplace_back(model->ptr(2)->parameters(), std::make_unique<optim::SGDOptions>(0.2));
  optim::SGD optimizer(groups, optim::SGDOptions(0.3));
  step(model, optimizer);
  const StateDict state = get_optimizer_state_dict(*model, optimizer);
  EXPECT_EQ(require_element<Dict>(state, {"state"}).size(), 2u);
  set_optimizer_state_dict(*model, optimizer, state);
  EXPECT_EQ(optimizer.state().size(), 2u);
}

TEST(SetOptimizerStateDictTest, OtherParametersAreNotLookedAt) {
  Trained trained;
  StateDict state = trained.copy();
  state.at("state").get<Dict>()["other"] = "whatever";
  group_of(state, 0).at("params").get<List>().push_back("other");
  state.at("param_groups").get<List>().push_back(Dict{{"params", List{"more"}}, {"maximize", true}});
  const StateDict before = trained.copy();
  trained.set(state);
  EXPECT_EQ(Value(trained.state()), Value(before));
}

TEST(SetOptimizerStateDictTest, GroupsAreFoundByTheirParameters) {
  Trained trained;
  StateDict state = trained.copy();
  std::swap(state.at("param_groups").get<List>()[0], state.at("param_groups").get<List>()[1]);
  const StateDict before = trained.copy();
  trained.set(state);
  EXPECT_EQ(Value(trained.state()), Value(before));
}

TEST(SetOptimizerStateDictTest, ParametersMayHaveNumbers) {
  Trained trained;
  StateDict state = trained.copy();
  Dict numbered;
  std::int64_t number = 0;
  for (const char* name : {"0.weight", "0.bias", "2.weight", "2.bias"}) {
    numbered[number++] = state.at("state").get<Dict>().at(name);
  }
  state["state"] = numbered;
  group_of(state, 0)["params"] = List{0, 1};
  group_of(state, 1)["params"] = List{2, 3};
  const StateDict before = trained.copy();
  trained.set(state);
  EXPECT_EQ(Value(trained.state()), Value(before));
  group_of(state, 1)["params"] = List{2};
  EXPECT_ERROR(trained.set(state), ErrorCode::invalid_argument, "numbers", "differ in number or size");
  group_of(state, 1)["params"] = List{2, "2.bias"};
  EXPECT_ERROR(trained.set(state), ErrorCode::invalid_argument, "both names and numbers");
}

// As read from a checkpoint of PyTorch, which has only texts of the keys of a dict.
TEST(SetOptimizerStateDictTest, NumbersMayBeTexts) {
  Trained trained;
  StateDict state = trained.copy();
  Dict numbered;
  std::int64_t number = 0;
  for (const char* name : {"0.weight", "0.bias", "2.weight", "2.bias"}) {
    numbered[std::to_string(number++)] = state.at("state").get<Dict>().at(name);
  }
  state["state"] = numbered;
  group_of(state, 0)["params"] = List{0, 1};
  group_of(state, 1)["params"] = List{2, 3};
  const StateDict before = trained.copy();
  trained.optimizer->state().clear();
  trained.set(state);
  EXPECT_EQ(Value(trained.state()), Value(before));
}

TEST(SetOptimizerStateDictTest, StatesUnderOtherNamesAreAnErrorAndNothingIsReset) {
  const auto with_prefix = [](const Dict& states) {
    Dict renamed;
    for (const auto& [name, state] : states) renamed["module." + std::get<std::string>(name)] = state;
    return renamed;
  };
  Trained trained;
  const StateDict before = trained.copy();
  StateDict named = trained.copy(), numbered = trained.copy();
  named["state"] = numbered["state"] = with_prefix(before.at("state").get<Dict>());
  group_of(numbered, 0)["params"] = List{0, 1};
  group_of(numbered, 1)["params"] = List{2, 3};
  StateDict flat;
  for (const auto& [key, value] :
       get_optimizer_state_dict(*trained.model, *trained.optimizer, {.flatten_optimizer_state_dict = true})) {
    std::string name = std::get<std::string>(key);
    if (name.starts_with("state.")) name.insert(name.find('.') + 1, "module.");
    flat[name] = value;
  }
  for (const StateDict& state : {named, numbered, flat}) {
    EXPECT_ERROR(trained.set(state), ErrorCode::invalid_argument, "missing: the state of parameter '", "'module.0.",
                 "' has state and is in no group");
    EXPECT_EQ(Value(trained.state()), Value(before));
  }
}

TEST(SetOptimizerStateDictTest, AParameterIsFoundUnderAnyOfItsNames) {
  nn::Sequential model(nn::Linear(2, 2));
  model->register_module("tied", model->ptr(0));
  optim::SGD optimizer(model->ptr(0)->parameters(), optim::SGDOptions(0.1).momentum(0.9));
  StateDict named = get_optimizer_state_dict(*model, optimizer);
  group_of(named, 0)["params"] = List{"tied.weight", "0.bias"};
  named["state"] = Dict{{"tied.weight", Dict{{"momentum_buffer", at::ones({2, 2})}}},
                        {"0.bias", Dict{{"momentum_buffer", nullptr}}}};
  set_optimizer_state_dict(*model, optimizer, named);
  EXPECT_EQ(optimizer.state().size(), 1u);
  const StateDict ours = get_optimizer_state_dict(*model, optimizer);
  EXPECT_EQ(Value(*get_element(ours, {"state", "0.weight", "momentum_buffer"})), Value(at::ones({2, 2})));
}

TEST(SetOptimizerStateDictTest, OptionsThatChangeTheResultAndThatCppHasNotAreRefusedByName) {
  Trained trained;
  const StateDict good = trained.copy();
  for (const char* name : {"maximize", "decoupled_weight_decay"}) {
    StateDict state = good;
    group_of(state, 1)[name] = true;
    EXPECT_ERROR(trained.set(state), ErrorCode::unsupported, std::string("'") + name + "' of group 1 is True",
                 "expected False", "(Adam)");
    EXPECT_ERROR(trained.set(state, false), ErrorCode::unsupported, name);
    group_of(state, 1).erase(name);
    trained.set(state);
  }
  StateDict unknown = good;
  group_of(unknown, 0)["lookahead"] = 3;
  state_of(unknown, "0.bias")["shadow"] = at::zeros({1});
  EXPECT_ERROR(trained.set(unknown), ErrorCode::unsupported, "unknown option 'lookahead' of group 0",
               "unknown key 'shadow' of parameter '0.bias'");
  trained.set(unknown, false);
}

TEST(SetOptimizerStateDictTest, OptionsWithoutEffectArePassedOver) {
  Trained trained;
  StateDict state = trained.copy();
  for (const char* name : {"foreach", "fused", "capturable", "differentiable"}) group_of(state, 0)[name] = true;
  group_of(state, 0)["initial_lr"] = 0.5;
  group_of(state, 0)["lr"] = at::scalar_tensor(0.25);
  trained.set(state);
  const StateDict ours = trained.state();
  EXPECT_EQ(require_element<double>(ours, {"param_groups", 0, "lr"}), 0.25);
}

TEST(SetOptimizerStateDictTest, AllThatIsWrongIsOneErrorAndNothingIsChanged) {
  Trained trained;
  const StateDict before = trained.copy();
  StateDict state = before;
  group_of(state, 0)["lr"] = "fast";
  group_of(state, 0)["betas"] = Tuple{0.9};
  group_of(state, 0)["amsgrad"] = 1;
  group_of(state, 1)["lr"] = 5.0;
  group_of(state, 1).erase("eps");
  state_of(state, "0.weight")["exp_avg"] = at::zeros({3, 2});
  state_of(state, "0.bias")["step"] = at::scalar_tensor(1.5);
  state_of(state, "2.weight").erase("exp_avg_sq");
  state.at("state").get<Dict>().erase("2.bias");
  EXPECT_ERROR(trained.set(state), ErrorCode::invalid_argument, "load optimizer state dict (Adam)",
               "'lr' of group 0 is 'fast', expected a number", "'betas' of group 0 is (0.9,), expected two numbers",
               "'amsgrad' of group 0 is 1, expected a bool", "'eps' of group 1",
               "'exp_avg' of parameter '0.weight' is <float32 tensor [3, 2]>, expected a tensor [2, 3]",
               "'step' of parameter '0.bias'", "expected an int of at least 0", "'exp_avg_sq' of parameter '2.weight'",
               "the state of parameter '2.bias'");
  EXPECT_EQ(Value(trained.state()), Value(before));
}

TEST(SetOptimizerStateDictTest, AParameterWithoutAStateBeginsAnewIfNotStrict) {
  Trained trained;
  StateDict state = trained.copy();
  state.at("state").get<Dict>().erase("2.bias");
  EXPECT_ERROR(trained.set(state), ErrorCode::invalid_argument, "missing: the state of parameter '2.bias'");
  trained.set(state, false);
  EXPECT_EQ(trained.optimizer->state().size(), 3u);
}

TEST(SetOptimizerStateDictTest, GroupsThatDoNotFitAreAnError) {
  Trained trained;
  StateDict state = trained.copy();
  group_of(state, 0)["params"] = List{"0.weight"};
  EXPECT_ERROR(trained.set(state), ErrorCode::invalid_argument, "missing: parameter '0.bias' in param_groups");
  group_of(state, 1)["params"] = List{"2.weight", "2.bias", "0.bias"};
  EXPECT_ERROR(trained.set(state), ErrorCode::invalid_argument, "groups 0 and 1 of the state", "'0.bias'");
}

TEST(SetOptimizerStateDictTest, WhatIsNoStateOfAnOptimizerIsAnErrorThatNamesTheKey) {
  Trained trained;
  EXPECT_ERROR(trained.set({{"param_groups", List{}}}), ErrorCode::not_found, "'state'");
  EXPECT_ERROR(trained.set({{"state", Dict{}}, {"param_groups", List{3}}}), ErrorCode::invalid_argument,
               "param_groups.0", "expected dict");
  EXPECT_ERROR(trained.set({{"state", Dict{}}, {"param_groups", List{Dict{{"params", List{0.5}}}}}}),
               ErrorCode::invalid_argument, "'param_groups.0.params' has 0.5");
  StateDict state = trained.copy();
  state.at("state").get<Dict>()["0.bias"] = 3;
  EXPECT_ERROR(trained.set(state), ErrorCode::invalid_argument, "state of parameter '0.bias' is 3, expected a dict");
}

TEST(SetOptimizerStateDictTest, AGroupWithoutParametersIsFoundAsSuch) {
  nn::Sequential model = make_model();
  std::vector<optim::OptimizerParamGroup> groups;
  groups.emplace_back(model->parameters());
  groups.emplace_back(std::vector<at::Tensor>(), std::make_unique<optim::SGDOptions>(0.5));
  optim::SGD optimizer(groups, optim::SGDOptions(0.1));
  StateDict state = get_optimizer_state_dict(*model, optimizer);
  group_of(state, 1)["lr"] = 0.75;
  set_optimizer_state_dict(*model, optimizer, state);
  EXPECT_EQ(optimizer.param_groups()[1].options().get_lr(), 0.75);
  state.at("param_groups").get<List>().resize(1);
  EXPECT_ERROR(set_optimizer_state_dict(*model, optimizer, state), ErrorCode::invalid_argument,
               "0 groups without parameters");
}

TEST(SetOptimizerStateDictTest, GroupsWithoutParametersKeepTheirOptionsIfTheStateIsFlattened) {
  StateDictOptions flat;
  flat.flatten_optimizer_state_dict = true;
  for (const bool has_parameters : {true, false}) {
    nn::Sequential model = make_model();
    std::vector<optim::OptimizerParamGroup> groups;
    groups.emplace_back(std::vector<at::Tensor>(), std::make_unique<optim::SGDOptions>(0.25));
    groups.emplace_back(has_parameters ? model->parameters() : std::vector<at::Tensor>());
    groups.emplace_back(std::vector<at::Tensor>(), std::make_unique<optim::SGDOptions>(0.5));
    optim::SGD optimizer(groups, optim::SGDOptions(0.1));
    const StateDict state = get_optimizer_state_dict(*model, optimizer, flat);
    EXPECT_EQ(state.empty(), !has_parameters);
    for (auto& group : optimizer.param_groups()) group.options().set_lr(2 * group.options().get_lr());
    set_optimizer_state_dict(*model, optimizer, state, flat);
    EXPECT_EQ(optimizer.param_groups()[0].options().get_lr(), 0.5);
    EXPECT_EQ(optimizer.param_groups()[1].options().get_lr(), has_parameters ? 0.1 : 0.2);
    EXPECT_EQ(optimizer.param_groups()[2].options().get_lr(), 1);
    if (!has_parameters) continue;
    EXPECT_ERROR(set_optimizer_state_dict(*model, optimizer, StateDict(), flat), ErrorCode::not_found, "'state'");
  }
}

TEST(SetOptimizerStateDictTest, GroupsWithoutParametersMatchByPositionIfParametersHaveNumbers) {
  nn::Sequential model = make_model();
  std::vector<optim::OptimizerParamGroup> groups;
  groups.emplace_back(std::vector<at::Tensor>(), std::make_unique<optim::SGDOptions>(0.25));
  groups.emplace_back(model->parameters());
  groups.emplace_back(std::vector<at::Tensor>(), std::make_unique<optim::SGDOptions>(0.5));
  optim::SGD optimizer(groups, optim::SGDOptions(0.1));
  StateDict state = get_optimizer_state_dict(*model, optimizer);
  group_of(state, 1)["params"] = List{0, 1, 2, 3};
  group_of(state, 2)["lr"] = 0.75;
  set_optimizer_state_dict(*model, optimizer, state);
  EXPECT_EQ(optimizer.param_groups()[0].options().get_lr(), 0.25);
  EXPECT_EQ(optimizer.param_groups()[2].options().get_lr(), 0.75);
}

}  // namespace
}  // namespace tessera
