// Names and numbers of parameters in optimizer states.

#include <gtest/gtest.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include "support/error_matchers.h"
#include "tessera/state/optimizer_state.h"

namespace tessera {
namespace {

struct ToRekey {
  torch::nn::Sequential model{torch::nn::Linear(2, 3), torch::nn::Linear(3, 2)};
  // The parameters of the second layer come first.
  torch::optim::SGD optimizer{{torch::optim::OptimizerParamGroup(model->ptr(1)->parameters()),
                               torch::optim::OptimizerParamGroup(model->ptr(0)->parameters())},
                              torch::optim::SGDOptions(0.1).momentum(0.9)};

  ToRekey() {
    model->forward(at::ones({1, 2})).sum().backward();
    optimizer.step();
  }
};

Value names_of_group(const StateDict& state, std::size_t g) {
  return state.at("param_groups").get<List>()[g].get<Dict>().at("params");
}

// PyTorch: test_rekey_optim_state_dict_to_ids, test_rekey_optim_state_dict_to_names.
TEST(RekeyOptimStateDictTest, NumbersCountTheParametersOfTheOptimizerOrOfTheModule) {
  const ToRekey made;
  const StateDict named = get_optimizer_state_dict(*made.model, made.optimizer);
  const Dict& states = named.at("state").get<Dict>();
  const StateDict by_optimizer =
      rekey_optim_state_dict(named, OptimStateKeyType::param_id, *made.model, &made.optimizer);
  EXPECT_EQ(names_of_group(by_optimizer, 0), Value(List{0, 1}));
  EXPECT_EQ(names_of_group(by_optimizer, 1), Value(List{2, 3}));
  EXPECT_EQ(by_optimizer.at("state").get<Dict>().at(0), states.at("1.weight"));
  EXPECT_EQ(by_optimizer.at("state").get<Dict>().at(3), states.at("0.bias"));
  const StateDict by_model = rekey_optim_state_dict(named, OptimStateKeyType::param_id, *made.model);
  EXPECT_EQ(names_of_group(by_model, 0), Value(List{2, 3}));
  EXPECT_EQ(by_model.at("state").get<Dict>().at(0), states.at("0.weight"));
  for (const auto* optimizer : {static_cast<const torch::optim::Optimizer*>(&made.optimizer),
                                static_cast<const torch::optim::Optimizer*>(nullptr)}) {
    const StateDict& numbered = optimizer != nullptr ? by_optimizer : by_model;
    EXPECT_EQ(rekey_optim_state_dict(numbered, OptimStateKeyType::param_name, *made.model, optimizer), named);
    EXPECT_EQ(rekey_optim_state_dict(numbered, OptimStateKeyType::param_id, *made.model, optimizer), numbered);
  }
  EXPECT_EQ(rekey_optim_state_dict(named, OptimStateKeyType::param_name, *made.model), named);

  ToRekey other;
  set_optimizer_state_dict(*other.model, other.optimizer, by_optimizer);
  EXPECT_EQ(get_optimizer_state_dict(*other.model, other.optimizer), named);

  StateDict without_groups = named;
  without_groups.erase("param_groups");
  EXPECT_FALSE(
      rekey_optim_state_dict(without_groups, OptimStateKeyType::param_id, *made.model).contains("param_groups"));
}

TEST(RekeyOptimStateDictTest, KeysThatNoParameterHasAreRefused) {
  const ToRekey made;
  const auto rekey = [&](const StateDict& state, OptimStateKeyType type) {
    return rekey_optim_state_dict(state, type, *made.model);
  };
  const auto state_of_keys = [](Dict states, List params) {
    return StateDict{{"state", std::move(states)}, {"param_groups", List{Dict{{"params", std::move(params)}}}}};
  };
  EXPECT_ERROR(rekey(state_of_keys({{"0.weight", Dict()}, {1, Dict()}}, {}), OptimStateKeyType::param_id),
               ErrorCode::invalid_argument, "both names and numbers");
  EXPECT_ERROR(rekey(state_of_keys({{"0.weight", Dict()}}, {0}), OptimStateKeyType::param_id),
               ErrorCode::invalid_argument, "both names and numbers");
  EXPECT_ERROR(rekey(state_of_keys({{"2.weight", Dict()}}, {}), OptimStateKeyType::param_id),
               ErrorCode::invalid_argument, "no parameter is called '2.weight'");
  EXPECT_ERROR(rekey(state_of_keys({{4, Dict()}}, {0, 1, 2, 3}), OptimStateKeyType::param_name),
               ErrorCode::invalid_argument, "number 4, expected 0 to 3");
  EXPECT_ERROR(rekey(state_of_keys({{-1, Dict()}}, {0, 1, 2, 3}), OptimStateKeyType::param_name),
               ErrorCode::invalid_argument, "number -1, expected 0 to 3");
  EXPECT_ERROR(rekey(state_of_keys({}, {0, 1, 2}), OptimStateKeyType::param_name), ErrorCode::invalid_argument,
               "its groups have 3 parameters, expected 4, those of the module");
  EXPECT_ERROR(rekey(state_of_keys({}, {0, 0, 1, 2}), OptimStateKeyType::param_name), ErrorCode::invalid_argument,
               "two keys are of parameter '0.weight'");
  EXPECT_ERROR(rekey(state_of_keys({}, {1.5}), OptimStateKeyType::param_name), ErrorCode::invalid_argument,
               "is 1.5, expected a name or a number");
}

}  // namespace
}  // namespace tessera
