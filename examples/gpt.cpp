#include "gpt.h"

#include <torch/types.h>
#include <torch/utils.h>

#include <cmath>
#include <limits>

#include "tessera/base/error.h"

namespace tessera::examples {

AttentionImpl::AttentionImpl(const GptConfig& config) : heads(config.heads) {
  query_key_value = register_module("query_key_value", torch::nn::Linear(config.width, 3 * config.width));
  out = register_module("out", torch::nn::Linear(config.width, config.width));
}

at::Tensor AttentionImpl::forward(const at::Tensor& x) {
  const std::int64_t rows = x.size(0), length = x.size(1), width = x.size(2), size = width / heads;
  // Each [rows, heads, length, size].
  const auto parts = query_key_value(x).view({rows, length, 3, heads, size}).permute({2, 0, 3, 1, 4}).unbind();
  const at::Tensor &query = parts[0], &key = parts[1], &value = parts[2];
  const at::Tensor is_later = torch::ones({length, length}, x.options().dtype(torch::kBool)).triu(1);
  const at::Tensor scores = query.matmul(key.transpose(2, 3)).div(std::sqrt(static_cast<double>(size)));
  const at::Tensor weights = scores.masked_fill(is_later, -std::numeric_limits<double>::infinity()).softmax(3);
  return out(weights.matmul(value).transpose(1, 2).reshape({rows, length, width}));
}

BlockImpl::BlockImpl(const GptConfig& config) {
  const torch::nn::LayerNormOptions norm({config.width});
  attention_norm = register_module("attention_norm", torch::nn::LayerNorm(norm));
  attention = register_module("attention", Attention(config));
  mlp_norm = register_module("mlp_norm", torch::nn::LayerNorm(norm));
  up = register_module("up", torch::nn::Linear(config.width, 4 * config.width));
  down = register_module("down", torch::nn::Linear(4 * config.width, config.width));
}

at::Tensor BlockImpl::forward(const at::Tensor& x) {
  const at::Tensor attended = x + attention(attention_norm(x));
  return attended + down(torch::gelu(up(mlp_norm(attended))));
}

GptImpl::GptImpl(const GptConfig& config) {
  if (config.heads < 1 || config.width % config.heads != 0) {
    fail(ErrorCode::invalid_argument,
         "model: found width {} and {} heads, expected a number of heads that divides the width", config.width,
         config.heads);
  }
  embedding = register_module("embedding", torch::nn::Embedding(config.characters, config.width));
  position = register_module("position", torch::nn::Embedding(config.context, config.width));
  blocks = register_module("blocks", torch::nn::Sequential());
  for (std::int64_t i = 0; i < config.layers; ++i) blocks->push_back(fsdp::Wrap<Block>(config));
  norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({config.width})));
  head = register_module("head", torch::nn::Linear(config.width, config.characters));
  initialize(config);
}

// Draws weights from normal distributions that keep the scale of activations. As in GPT-2, weights of layers that add
// to the residual stream are smaller, by the number of additions.
void GptImpl::initialize(const GptConfig& config) {
  const double usual = 1 / std::sqrt(static_cast<double>(config.width));
  const double added = usual / std::sqrt(2.0 * static_cast<double>(config.layers));
  const torch::NoGradGuard no_grad;
  for (const auto& parameter : named_parameters()) {
    const std::string& name = parameter.key();
    const bool is_added = name.ends_with("out.weight") || name.ends_with("down.weight");
    if (parameter.value().dim() > 1) parameter.value().normal_(0, is_added ? added : usual);
    if (name.ends_with("bias")) parameter.value().zero_();
  }
}

at::Tensor GptImpl::forward(const at::Tensor& tokens) {
  const at::Tensor places = torch::arange(tokens.size(1), tokens.options());
  return head(norm(blocks->forward(embedding(tokens) + position(places))));
}

}  // namespace tessera::examples
