#pragma once
/// \file
/// A small GPT over characters: what train_gpt trains.
///
/// Each block is held in an `fsdp::Wrap`, so that a FullyShardedDataParallel can shard it by itself; without one the
/// model is a module like any other. Its parameters begin as LibTorch's generator has them: the same after the same
/// `torch::manual_seed`.

#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/pimpl.h>

#include <cstdint>

#include "tessera/fsdp/wrap.h"

namespace tessera::examples {

struct GptConfig {
  std::int64_t characters = 0;  ///< how many different ones there are
  std::int64_t context = 64;    ///< how many of them it sees at most
  std::int64_t layers = 4;
  std::int64_t heads = 4;  ///< a divisor of `width`
  std::int64_t width = 128;
};

/// Every place looks at itself and at those before it.
struct AttentionImpl : torch::nn::Module {
  explicit AttentionImpl(const GptConfig& config);
  /// [rows, length, width] to the same.
  at::Tensor forward(const at::Tensor& x);

  std::int64_t heads;
  torch::nn::Linear query_key_value{nullptr}, out{nullptr};
};
TORCH_MODULE(Attention);

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(const GptConfig& config);
  /// [rows, length, width] to the same.
  at::Tensor forward(const at::Tensor& x);

  torch::nn::LayerNorm attention_norm{nullptr}, mlp_norm{nullptr};
  Attention attention{nullptr};
  torch::nn::Linear up{nullptr}, down{nullptr};
};
TORCH_MODULE(Block);

struct GptImpl : torch::nn::Module {
  /// Throws `Error(invalid_argument)` for a width that the heads don't divide.
  explicit GptImpl(const GptConfig& config);
  /// From characters' numbers, int64 [rows, length], length <= context, to logits of the character behind each,
  /// [rows, length, characters].
  at::Tensor forward(const at::Tensor& tokens);

  torch::nn::Embedding embedding{nullptr}, position{nullptr};
  torch::nn::Sequential blocks{nullptr};
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear head{nullptr};

 private:
  void initialize(const GptConfig& config);
};
TORCH_MODULE(Gpt);

}  // namespace tessera::examples
