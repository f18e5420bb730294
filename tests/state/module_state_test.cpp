#include "tessera/state/module_state.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn.h>

#include "state/golden_values.h"
#include "support/error_matchers.h"
#include "tensor/sharding_support.h"

namespace tessera {
namespace {

namespace nn = torch::nn;
using ::testing::ElementsAre;

// The Net of tests/golden/state/generate.py. Its own tensors come first, whatever the order of registration.
struct NetImpl : nn::Module {
  NetImpl() {
    nn::ModuleList body(nn::Linear(3, 4), nn::Linear(nn::LinearOptions(4, 2).bias(false)));
    register_module("body", body);
    register_buffer("mean", torch::zeros(3));
    register_parameter("scale", torch::ones(2));
    using Named = std::pair<std::string, std::shared_ptr<nn::Module>>;
    nn::ModuleDict named(std::vector<Named>{{"norm", nn::BatchNorm1d(2).ptr()}, {"act", nn::ReLU().ptr()}});
    register_module("named", named);
    register_parameter("shift", torch::zeros({}));
    register_module("tied", body[0]);
  }
};
TORCH_MODULE(Net);

std::map<std::string, std::shared_ptr<nn::Module>> modules() {
  using Maker = std::map<std::string, std::shared_ptr<nn::Module>>;
  return Maker{
      {"linear", nn::Linear(3, 2).ptr()},
      {"linear_no_bias", nn::Linear(nn::LinearOptions(3, 2).bias(false)).ptr()},
      {"bilinear", nn::Bilinear(2, 3, 4).ptr()},
      {"sequential", nn::Sequential(nn::Linear(3, 4), nn::ReLU(), nn::Linear(4, 2)).ptr()},
      {"batch_norm", nn::BatchNorm1d(4).ptr()},
      {"batch_norm_2d_not_affine", nn::BatchNorm2d(nn::BatchNormOptions(4).affine(false)).ptr()},
      {"batch_norm_no_stats", nn::BatchNorm1d(nn::BatchNormOptions(4).track_running_stats(false)).ptr()},
      {"instance_norm", nn::InstanceNorm1d(nn::InstanceNormOptions(4).affine(true).track_running_stats(true)).ptr()},
      {"layer_norm", nn::LayerNorm(nn::LayerNormOptions({2, 3})).ptr()},
      {"layer_norm_not_affine", nn::LayerNorm(nn::LayerNormOptions({2, 3}).elementwise_affine(false)).ptr()},
      {"group_norm", nn::GroupNorm(2, 4).ptr()},
      {"embedding", nn::Embedding(5, 3).ptr()},
      {"embedding_bag", nn::EmbeddingBag(5, 3).ptr()},
      {"lstm", nn::LSTM(2, 3).ptr()},
      {"lstm_two_layers_both_ways", nn::LSTM(nn::LSTMOptions(2, 3).num_layers(2).bidirectional(true)).ptr()},
      {"lstm_projected", nn::LSTM(nn::LSTMOptions(2, 4).proj_size(3)).ptr()},
      {"gru_no_bias", nn::GRU(nn::GRUOptions(2, 3).bias(false)).ptr()},
      {"rnn", nn::RNN(nn::RNNOptions(2, 3).num_layers(2)).ptr()},
      {"lstm_cell", nn::LSTMCell(2, 3).ptr()},
      {"multihead_attention", nn::MultiheadAttention(4, 2).ptr()},
      {"multihead_attention_no_bias", nn::MultiheadAttention(nn::MultiheadAttentionOptions(4, 2).bias(false)).ptr()},
      {"multihead_attention_other_sizes",
       nn::MultiheadAttention(nn::MultiheadAttentionOptions(4, 2).add_bias_kv(true).kdim(3).vdim(5)).ptr()},
      {"conv1d", nn::Conv1d(2, 3, 3).ptr()},
      {"conv2d_no_bias", nn::Conv2d(nn::Conv2dOptions(2, 4, {3, 2}).groups(2).bias(false)).ptr()},
      {"conv_transpose2d", nn::ConvTranspose2d(2, 3, 3).ptr()},
      {"prelu", nn::PReLU(nn::PReLUOptions().num_parameters(3)).ptr()},
      {"transformer_encoder_layer",
       nn::TransformerEncoderLayer(nn::TransformerEncoderLayerOptions(4, 2).dim_feedforward(6)).ptr()},
      {"transformer_decoder_layer",
       nn::TransformerDecoderLayer(nn::TransformerDecoderLayerOptions(4, 2).dim_feedforward(6)).ptr()},
      {"net", Net().ptr()},
  };
}

TEST(ModelStateDictTest, NamesAndOrderAreThoseOfPython) {
  const nlohmann::json expected = testing::read_state_json("modules.json");
  const auto ours = modules();
  ASSERT_EQ(ours.size(), expected.size());
  for (const auto& [name, module] : ours) {
    nlohmann::json described = nlohmann::json::array();
    for (const auto& [key, value] : get_model_state_dict(*module)) {
      const auto& tensor = value.get<at::Tensor>();
      described.push_back(
          {std::get<std::string>(key), tensor.sizes().vec(), dtype_name(to_dtype(tensor.scalar_type()))});
    }
    EXPECT_EQ(described, expected.at(name)) << name;
  }
}

TEST(ModelStateDictTest, TensorsAreTheModulesOwnAndDetached) {
  nn::Linear linear(2, 2);
  const StateDict state = get_model_state_dict(*linear);
  const auto& weight = state.at("weight").get<at::Tensor>();
  EXPECT_FALSE(weight.requires_grad());
  weight.fill_(7);
  EXPECT_TRUE(at::equal(linear->weight.detach(), at::full({2, 2}, 7.0F)));
}

TEST(ModelStateDictTest, TwoTensorsOfOneNameAreAnError) {
  struct Twice : nn::Module {
    Twice() {
      register_module("a", nn::Sequential(nn::Linear(1, 1)));
      register_module("a.0", nn::Linear(1, 1));
    }
  };
  std::shared_ptr<Twice> module;
  try {
    module = std::make_shared<Twice>();
  } catch (const c10::Error&) {
    return;  // this LibTorch rejects the name itself
  }
  EXPECT_ERROR(get_model_state_dict(*module), ErrorCode::invalid_argument, "'a.0.weight'");
}

TEST(SetModelStateDictTest, CopiesIntoTheTensorsThatAreThere) {
  nn::BatchNorm1d source(3), target(3);
  source->weight.detach().copy_(at::arange(3));
  source->running_mean.fill_(5);
  source->num_batches_tracked.fill_(9);
  const void* before = target->weight.data_ptr();
  const IncompatibleKeys keys = set_model_state_dict(*target, get_model_state_dict(*source));
  EXPECT_TRUE(keys.missing.empty() && keys.unexpected.empty());
  EXPECT_EQ(target->weight.data_ptr(), before);
  EXPECT_TRUE(target->weight.requires_grad());
  EXPECT_EQ(Value(get_model_state_dict(*target)), Value(get_model_state_dict(*source)));
  source->weight.detach().fill_(0);
  EXPECT_TRUE(at::equal(target->weight.detach(), at::arange(3, at::kFloat)));
}

TEST(SetModelStateDictTest, ConvertsToTheDtypeThatIsThere) {
  nn::Linear linear(2, 2);
  set_model_state_dict(*linear, {{"weight", at::full({2, 2}, 3.0, at::kDouble)}, {"bias", at::ones({2}, at::kHalf)}});
  EXPECT_EQ(linear->weight.scalar_type(), at::kFloat);
  EXPECT_TRUE(at::equal(linear->weight.detach(), at::full({2, 2}, 3.0F)));
}

TEST(SetModelStateDictTest, ATensorOfSeveralNamesStaysOne) {
  Net net;
  StateDict state = get_model_state_dict(*net);
  for (const char* name : {"body.0.weight", "tied.weight"}) state[name] = at::full({4, 3}, 2.0F);
  set_model_state_dict(*net, state);
  const StateDict after = get_model_state_dict(*net);
  const auto& weight = after.at("body.0.weight").get<at::Tensor>();
  EXPECT_EQ(weight.data_ptr(), after.at("tied.weight").get<at::Tensor>().data_ptr());
  EXPECT_TRUE(at::equal(weight, at::full({4, 3}, 2.0F)));
}

TEST(SetModelStateDictTest, AllThatIsWrongIsOneErrorAndNothingIsChanged) {
  nn::Sequential model(nn::Linear(3, 4), nn::Linear(4, 2));
  const StateDict before = get_model_state_dict(*model);
  std::vector<at::Tensor> copies;
  for (const auto& [key, value] : before) copies.push_back(value.get<at::Tensor>().clone());
  const StateDict bad{{"0.weight", at::zeros({4, 3})},
                      {"0.bias", at::zeros({5})},
                      {"1.weight", "text"},
                      {"2.weight", at::zeros({1})},
                      {7, 1}};
  EXPECT_ERROR(set_model_state_dict(*model, bad), ErrorCode::invalid_argument,
               "size mismatch: '0.bias' is [5], expected [4]", "not a tensor: '1.weight' is str", "missing: '1.bias'",
               "unexpected: '2.weight', '7'");
  const StateDict complex{{"0.weight", at::zeros({4, 3}, at::kComplexFloat)}};
  EXPECT_ERROR(set_model_state_dict(*model, complex, {.strict = false}), ErrorCode::invalid_argument,
               "'0.weight' is complex");
  std::size_t i = 0;
  for (const auto& [key, value] : get_model_state_dict(*model)) EXPECT_EQ(value, Value(copies[i++])) << to_string(key);
}

TEST(SetModelStateDictTest, APartIsLoadedIfOneAsksForIt) {
  nn::Linear linear(2, 2);
  const IncompatibleKeys keys =
      set_model_state_dict(*linear, {{"weight", at::zeros({2, 2})}, {"x", 1}, {"y", 2}}, {.strict = false});
  EXPECT_THAT(keys.missing, ElementsAre("bias"));
  EXPECT_THAT(keys.unexpected, ElementsAre("x", "y"));
  EXPECT_TRUE(at::equal(linear->weight.detach(), at::zeros({2, 2})));
  EXPECT_ERROR(set_model_state_dict(*linear, {{"weight", at::zeros({2})}}, {.strict = false}),
               ErrorCode::invalid_argument, "size mismatch: 'weight'");
}

TEST(SetModelStateDictTest, ALongListOfProblemsIsCut) {
  nn::Sequential model;
  for (int i = 0; i < 15; ++i) model->push_back(nn::Linear(1, 1));
  EXPECT_ERROR(set_model_state_dict(*model, {}), ErrorCode::invalid_argument, "missing: '0.weight'", "and 10 more");
}

}  // namespace
}  // namespace tessera
