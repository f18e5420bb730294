#pragma once
// Models to the structure of those that C++ programs train, small: convolutions with dropout, a residual network with
// batch norms, a vision transformer, a decoder whose layers are called by their own class.

#include <torch/nn/functional/activation.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include <cmath>
#include <vector>

#include "tessera/fsdp/wrap.h"

namespace tessera::fsdp::models {

// Digits: plain members, as in LibTorch's example.
struct DigitsImpl : torch::nn::Module {
  DigitsImpl() {
    register_module("conv1", conv1);
    register_module("conv2", conv2);
    register_module("drop", drop);
    register_module("fc1", fc1);
    register_module("fc2", fc2);
  }
  at::Tensor forward(at::Tensor x) {
    x = at::relu(at::max_pool2d(conv1->forward(x), 2));
    x = at::relu(at::max_pool2d(drop->forward(conv2->forward(x)), 2));
    x = at::relu(fc1->forward(x.view({x.size(0), -1})));
    x = at::dropout(x, 0.5, is_training());
    return at::log_softmax(fc2->forward(x), 1);
  }
  torch::nn::Conv2d conv1{torch::nn::Conv2dOptions(1, 3, 3)}, conv2{torch::nn::Conv2dOptions(3, 4, 3)};
  torch::nn::Dropout2d drop;
  torch::nn::Linear fc1{16, 10}, fc2{10, 5};
};
TORCH_MODULE(Digits);

// Generator and discriminator of images of 8 x 8.
struct GeneratorImpl : torch::nn::Module {
  GeneratorImpl() {
    const auto transposed = [](int in, int out, int kernel, int stride, int padding) {
      return torch::nn::ConvTranspose2dOptions(in, out, kernel).stride(stride).padding(padding).bias(false);
    };
    layers = register_module(
        "layers", torch::nn::Sequential(torch::nn::ConvTranspose2d(transposed(3, 6, 4, 1, 0)),
                                        torch::nn::BatchNorm2d(6), torch::nn::ReLU(),
                                        torch::nn::ConvTranspose2d(transposed(6, 1, 4, 2, 1)), torch::nn::Tanh()));
  }
  at::Tensor forward(const at::Tensor& x) { return layers->forward(x); }
  torch::nn::Sequential layers{nullptr};
};
TORCH_MODULE(Generator);

struct DiscriminatorImpl : torch::nn::Module {
  DiscriminatorImpl() {
    const auto conv = [](int in, int out, int stride, int padding) {
      return torch::nn::Conv2dOptions(in, out, 4).stride(stride).padding(padding).bias(false);
    };
    const auto leaky = [] { return torch::nn::LeakyReLU(torch::nn::LeakyReLUOptions().negative_slope(0.2)); };
    layers =
        register_module("layers", torch::nn::Sequential(Wrap<torch::nn::Conv2d>(conv(1, 4, 2, 1)), leaky(),
                                                        Wrap<torch::nn::Conv2d>(conv(4, 6, 1, 0)),
                                                        Wrap<torch::nn::BatchNorm2d>(6), leaky(), torch::nn::Flatten(),
                                                        Wrap<torch::nn::Linear>(6, 1), torch::nn::Sigmoid()));
  }
  at::Tensor forward(const at::Tensor& x) { return layers->forward(x); }
  torch::nn::Sequential layers{nullptr};
};
TORCH_MODULE(Discriminator);

struct ResidualImpl : torch::nn::Module {
  ResidualImpl(int in, int out, int stride) {
    const auto conv = [](int from, int to, int kernel, int by) {
      return torch::nn::Conv2dOptions(from, to, kernel).stride(by).padding(kernel / 2).bias(false);
    };
    conv1 = register_module("conv1", torch::nn::Conv2d(conv(in, out, 3, stride)));
    bn1 = register_module("bn1", torch::nn::BatchNorm2d(out));
    conv2 = register_module("conv2", torch::nn::Conv2d(conv(out, out, 3, 1)));
    bn2 = register_module("bn2", torch::nn::BatchNorm2d(out));
    if (stride == 1 && in == out) return;
    downsample = register_module(
        "downsample", torch::nn::Sequential(torch::nn::Conv2d(conv(in, out, 1, stride)), torch::nn::BatchNorm2d(out)));
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor y = bn2(conv2(at::relu(bn1(conv1(x)))));
    return at::relu(y + (downsample.is_empty() ? x : downsample->forward(x)));
  }
  torch::nn::Conv2d conv1{nullptr}, conv2{nullptr};
  torch::nn::BatchNorm2d bn1{nullptr}, bn2{nullptr};
  torch::nn::Sequential downsample{nullptr};
};
TORCH_MODULE(Residual);

struct ResNetImpl : torch::nn::Module {
  ResNetImpl() {
    stem = register_module("stem", torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 4, 3).padding(1).bias(false)));
    bn = register_module("bn", torch::nn::BatchNorm2d(4));
    layers = register_module("layers", torch::nn::Sequential(Wrap<Residual>(4, 4, 1), Wrap<Residual>(4, 6, 2)));
    fc = register_module("fc", torch::nn::Linear(6, 3));
  }
  at::Tensor forward(at::Tensor x) {
    x = layers->forward(at::relu(bn(stem(x))));
    return fc(x.mean({2, 3}));
  }
  torch::nn::Conv2d stem{nullptr};
  torch::nn::BatchNorm2d bn{nullptr};
  torch::nn::Sequential layers{nullptr};
  torch::nn::Linear fc{nullptr};
};
TORCH_MODULE(ResNet);

struct VisionLayerImpl : torch::nn::Module {
  explicit VisionLayerImpl(int width) {
    norm1 = register_module("norm1", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    attention = register_module("attention", torch::nn::MultiheadAttention(width, 2));
    norm2 = register_module("norm2", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    mlp = register_module("mlp", torch::nn::Sequential(torch::nn::Linear(width, 2 * width), torch::nn::GELU(),
                                                       torch::nn::Dropout(0.1), torch::nn::Linear(2 * width, width)));
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor y = norm1(x), z = x + std::get<0>(attention(y, y, y));
    return z + mlp->forward(norm2(z));
  }
  torch::nn::LayerNorm norm1{nullptr}, norm2{nullptr};
  torch::nn::MultiheadAttention attention{nullptr};
  torch::nn::Sequential mlp{nullptr};
};
TORCH_MODULE(VisionLayer);

struct VisionTransformerImpl : torch::nn::Module {
  VisionTransformerImpl() {
    patches = register_module("patches", torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 6, 4).stride(4)));
    class_token = register_parameter("class_token", at::zeros({1, 1, 6}));
    positions = register_parameter("positions", at::randn({5, 1, 6}) * 0.1);
    for (int i = 0; i < 2; ++i) layers->push_back(Wrap<VisionLayer>(6));
    register_module("layers", layers);
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({6})));
    head = register_module("head", torch::nn::Linear(6, 3));
  }
  at::Tensor forward(const at::Tensor& images) {
    at::Tensor x = patches(images).flatten(2).permute({2, 0, 1});
    x = at::cat({class_token.expand({1, x.size(1), 6}), x}) + positions;
    for (const auto& layer : *layers) x = layer->as<VisionLayer>()->forward(x);
    return head(norm(x)[0]);
  }
  torch::nn::Conv2d patches{nullptr};
  at::Tensor class_token, positions;
  torch::nn::ModuleList layers;
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(VisionTransformer);

// A decoder in the manner of Llama: root mean square norms, rotary embeddings, grouped queries, gated layers.
struct RmsNormImpl : torch::nn::Module {
  explicit RmsNormImpl(int width) { weight = register_parameter("weight", at::ones({width})); }
  at::Tensor forward(const at::Tensor& x) { return x * at::rsqrt(x.square().mean(-1, true) + 1e-5) * weight; }
  at::Tensor weight;
};
TORCH_MODULE(RmsNorm);

struct DecoderLayerImpl : torch::nn::Module {
  static constexpr int kHeads = 4, kKeyHeads = 2;
  explicit DecoderLayerImpl(int width) : size(width / kHeads) {
    const auto linear = [](std::int64_t in, std::int64_t out) {
      return torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(false));
    };
    attention_norm = register_module("attention_norm", RmsNorm(width));
    wq = register_module("wq", linear(width, width));
    wk = register_module("wk", linear(width, kKeyHeads * size));
    wv = register_module("wv", linear(width, kKeyHeads * size));
    wo = register_module("wo", linear(width, width));
    ffn_norm = register_module("ffn_norm", RmsNorm(width));
    w1 = register_module("w1", linear(width, 12));
    w2 = register_module("w2", linear(12, width));
    w3 = register_module("w3", linear(width, 12));
  }
  at::Tensor forward(const at::Tensor& x, const at::Tensor& angles) {
    const at::Tensor h = x + attention(attention_norm(x), angles), y = ffn_norm(h);
    return h + w2(at::silu(w1(y)) * w3(y));
  }
  at::Tensor attention(const at::Tensor& x, const at::Tensor& angles) {
    const auto heads = [&](const at::Tensor& y) { return y.view({y.size(0), y.size(1), -1, size}).transpose(1, 2); };
    const at::Tensor q = rotated(heads(wq(x)), angles);
    const at::Tensor k = rotated(heads(wk(x)), angles).repeat_interleave(kHeads / kKeyHeads, 1);
    const at::Tensor v = heads(wv(x)).repeat_interleave(kHeads / kKeyHeads, 1);
    const at::Tensor later = at::ones({x.size(1), x.size(1)}, at::kBool).triu(1);
    const at::Tensor scores = at::matmul(q, k.transpose(2, 3)).div(std::sqrt(size)).masked_fill(later, -1e30);
    return wo(at::matmul(at::softmax(scores, -1), v).transpose(1, 2).reshape(x.sizes()));
  }
  static at::Tensor rotated(const at::Tensor& x, const at::Tensor& angles) {
    const std::vector<at::Tensor> halves = x.chunk(2, -1);
    const at::Tensor cos = angles.cos(), sin = angles.sin();
    return at::cat({halves[0] * cos - halves[1] * sin, halves[0] * sin + halves[1] * cos}, -1);
  }
  std::int64_t size;
  RmsNorm attention_norm{nullptr}, ffn_norm{nullptr};
  torch::nn::Linear wq{nullptr}, wk{nullptr}, wv{nullptr}, wo{nullptr}, w1{nullptr}, w2{nullptr}, w3{nullptr};
};
TORCH_MODULE(DecoderLayer);

struct DecoderImpl : torch::nn::Module {
  static constexpr int kWidth = 8, kTokens = 11;
  DecoderImpl() {
    tokens = register_module("tok_embeddings", torch::nn::Embedding(kTokens, kWidth));
    for (int i = 0; i < 3; ++i) layers->push_back(Wrap<DecoderLayer>(kWidth));
    register_module("layers", layers);
    norm = register_module("norm", RmsNorm(kWidth));
    output = register_module("output", torch::nn::Linear(torch::nn::LinearOptions(kWidth, kTokens).bias(false)));
    register_buffer("frequencies", at::pow(10000.0, -at::arange(1, at::kDouble)));
  }
  at::Tensor forward(const at::Tensor& ids) {
    const at::Tensor angles = at::arange(ids.size(1), at::kDouble).unsqueeze(1) * named_buffers()["frequencies"];
    at::Tensor h = tokens(ids);
    for (std::size_t i = 0; i < layers->size(); ++i) h = layers[i]->as<DecoderLayer>()->forward(h, angles);
    return output(norm(h));
  }
  torch::nn::Embedding tokens{nullptr};
  torch::nn::ModuleList layers;
  RmsNorm norm{nullptr};
  torch::nn::Linear output{nullptr};
};
TORCH_MODULE(Decoder);

}  // namespace tessera::fsdp::models
