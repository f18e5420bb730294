#pragma once
// The model of the benchmarks of FSDP.

#include <ATen/ops/relu.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <cstdint>

namespace tessera::bench {

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(std::int64_t width) : linear(register_module("linear", torch::nn::Linear(width, width))) {}
  at::Tensor forward(at::Tensor x) { return at::relu(linear(x)); }

  torch::nn::Linear linear;
};
TORCH_MODULE(Block);

// `Unit` is Block, or fsdp::Wrap<Block> for a model to shard.
template <typename Unit>
torch::nn::Sequential make_mlp(std::int64_t blocks, std::int64_t width) {
  torch::nn::Sequential mlp;
  for (std::int64_t i = 0; i < blocks; ++i) mlp->push_back(Unit(width));
  return mlp;
}

}  // namespace tessera::bench
