// First values of models that were built on meta.

#include "tessera/fsdp/reset_parameters.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn/functional/instancenorm.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/instancenorm.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/modules/rnn.h>
#include <torch/utils.h>

#include <memory>
#include <vector>

#include "fsdp/small_model.h"
#include "support/error_matchers.h"
#include "tessera/comm/local_ranks.h"
#include "tessera/fsdp/meta_init.h"

namespace tessera::fsdp {
namespace {

// Every layer of LibTorch that has values of its own.
struct EveryLayerImpl : torch::nn::Module {
  EveryLayerImpl() {
    using namespace torch::nn;  // NOLINT(google-build-using-namespace)
    const std::vector<std::shared_ptr<Module>> layers{
        Linear(3, 4).ptr(),
        Bilinear(2, 3, 4).ptr(),
        Embedding(EmbeddingOptions(5, 3).padding_idx(1)).ptr(),
        EmbeddingBag(5, 3).ptr(),
        Conv1d(2, 3, 2).ptr(),
        Conv2d(2, 3, 2).ptr(),
        Conv3d(2, 3, 2).ptr(),
        ConvTranspose1d(2, 3, 2).ptr(),
        ConvTranspose2d(2, 3, 2).ptr(),
        ConvTranspose3d(2, 3, 2).ptr(),
        BatchNorm1d(3).ptr(),
        BatchNorm2d(3).ptr(),
        BatchNorm3d(3).ptr(),
        LayerNorm(LayerNormOptions({3})).ptr(),
        GroupNorm(1, 3).ptr(),
        InstanceNorm1d(InstanceNorm1dOptions(3).affine(true)).ptr(),
        InstanceNorm2d(InstanceNorm2dOptions(3).affine(true)).ptr(),
        InstanceNorm3d(InstanceNorm3dOptions(3).affine(true).track_running_stats(true)).ptr(),
        RNN(2, 3).ptr(),
        LSTM(LSTMOptions(2, 3).num_layers(2).bidirectional(true)).ptr(),
        GRU(2, 3).ptr(),
        RNNCell(2, 3).ptr(),
        LSTMCell(2, 3).ptr(),
        GRUCell(2, 3).ptr(),
        MultiheadAttention(4, 2).ptr(),
        MultiheadAttention(MultiheadAttentionOptions(4, 2).kdim(3).vdim(2).add_bias_kv(true)).ptr(),
        PReLU().ptr(),
        Sequential(Linear(2, 2)).ptr()};
    for (std::size_t i = 0; i < layers.size(); ++i) register_module(std::to_string(i), layers[i]);
  }
  at::Tensor forward(const at::Tensor& x) { return x; }
};
TORCH_MODULE(EveryLayer);

template <typename Make>
auto on_meta(const Make& make) {
  const MetaInit without_memory;
  return make();
}

void expect_same_values(const torch::nn::Module& found, const torch::nn::Module& expected) {
  const auto params = found.named_parameters(), buffers = found.named_buffers();
  ASSERT_EQ(params.size(), expected.parameters().size());
  for (const auto& item : expected.named_parameters())
    EXPECT_TRUE(at::equal(params[item.key()], item.value())) << item.key();
  for (const auto& item : expected.named_buffers())
    EXPECT_TRUE(at::equal(buffers[item.key()], item.value())) << item.key();
}

TEST(ResetParametersTest, LayersHaveTheValuesOfTheirConstructors) {
  torch::manual_seed(3);
  const EveryLayer expected;
  torch::manual_seed(3);
  FullyShardedDataParallel<EveryLayer> model(on_meta([] { return EveryLayer(); }));
  model.summon_full_params([&] { expect_same_values(*model.module(), *expected); });
}

TEST(ResetParametersTest, TheValuesOfRank0AreEveryones) {
  run_local(2, [](const ProcessGroup& group) {
    Options options;
    options.sync_module_states = true;
    options.strategy = ShardingStrategy::no_shard;  // each rank has all values
    options.policy = wrap_modules<torch::nn::LinearImpl>();
    using torch::nn::Linear;
    FullyShardedDataParallel<torch::nn::Sequential> model(
        on_meta([] { return torch::nn::Sequential(Linear(64, 64), Linear(64, 1)); }), group, options);
    model.summon_full_params([&] {
      const at::Tensor weight = (*model.module())[0]->as<Linear>()->weight, copy = weight.clone();
      group.broadcast(copy, 0);
      EXPECT_TRUE(at::equal(copy, weight));
      EXPECT_LE(weight.abs().max().item<float>(), 0.125);  // uniform in 1 / sqrt(64)
      EXPECT_GT(weight.abs().max().item<float>(), 0.12);
      EXPECT_NEAR(weight.mean().item<float>(), 0, 0.01);
    });
  });
}

struct OwnImpl : torch::nn::Module {
  OwnImpl() {
    layer = register_module("layer", torch::nn::Linear(2, 2));
    factor = register_parameter("factor", at::ones({2}));
    reset_parameters();
  }
  void reset_parameters() { torch::nn::init::constant_(factor, 7); }
  at::Tensor forward(const at::Tensor& x) { return layer(x) * factor; }
  torch::nn::Linear layer{nullptr};
  at::Tensor factor;
};
TORCH_MODULE(Own);

// A layer with a parameter that the layer's function does not know.
struct LowRankImpl : torch::nn::LinearImpl {
  LowRankImpl() : LinearImpl(2, 2) { register_parameter("low_rank", at::ones({2, 1})); }
};

TEST(ResetParametersTest, OtherClassesNeedAFunction) {
  run_local(2, [](const ProcessGroup& group) {
    Options options;
    const auto shard = [&] { return FullyShardedDataParallel<Own>(on_meta([] { return Own(); }), group, options); };
    EXPECT_ERROR(shard(), ErrorCode::invalid_argument,
                 "'factor' of a tessera::fsdp::", "in unit '' is on meta, expected Options::param_init_fn");
    options.param_init_fn = reset_parameters<>();
    EXPECT_ERROR(shard(), ErrorCode::invalid_argument, "reset parameters: a ", "expected a layer of LibTorch");
    options.param_init_fn = reset_parameters<torch::nn::BilinearImpl, Own>();
    auto model = shard();
    model.summon_full_params([&] { EXPECT_EQ(model->factor.sum().item<float>(), 14); });
    options.param_init_fn = nullptr;
    EXPECT_ERROR(FullyShardedDataParallel<LowRankImpl>(on_meta([] { return std::make_shared<LowRankImpl>(); }), group),
                 ErrorCode::invalid_argument, "is on meta, expected Options::param_init_fn");
  });
}

}  // namespace
}  // namespace tessera::fsdp
