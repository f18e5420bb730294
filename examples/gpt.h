#pragma once
/// \file
/// A small character-level GPT, trained by train_gpt.
///
/// Each block is held in an `fsdp::Wrap`, so that FullyShardedDataParallel can shard it as a unit of its own. Without
/// FullyShardedDataParallel, the model is an ordinary module. Parameters are drawn from LibTorch's generator, so equal
/// seeds (`torch::manual_seed`) give equal models.

#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/pimpl.h>

#include <cstdint>

#include "tessera/fsdp/wrap.h"

namespace tessera::examples {

struct GptConfig {
  std::int64_t characters = 0;  ///< size of the vocabulary
  std::int64_t context = 64;    ///< maximum length of a row
  std::int64_t layers = 4;
  std::int64_t heads = 4;  ///< a divisor of `width`
  std::int64_t width = 128;
};

/// Causal self-attention: each position attends to itself and to earlier ones.
struct AttentionImpl : torch::nn::Module {
  explicit AttentionImpl(const GptConfig& config);
  /// Maps [rows, length, width] to the same shape.
  at::Tensor forward(const at::Tensor& x);

  std::int64_t heads;
  torch::nn::Linear query_key_value{nullptr}, out{nullptr};
};
TORCH_MODULE(Attention);

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(const GptConfig& config);
  /// Maps [rows, length, width] to the same shape.
  at::Tensor forward(const at::Tensor& x);

  torch::nn::LayerNorm attention_norm{nullptr}, mlp_norm{nullptr};
  Attention attention{nullptr};
  torch::nn::Linear up{nullptr}, down{nullptr};
};
TORCH_MODULE(Block);

struct GptImpl : torch::nn::Module {
  /// Throws `Error(invalid_argument)` unless `heads` divides `width`.
  explicit GptImpl(const GptConfig& config);
  /// Maps token ids, int64 [rows, length] with length <= context, to the logits of the next character,
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
