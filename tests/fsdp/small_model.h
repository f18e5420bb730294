#pragma once
// A small model that is hard to shard: it has parameters of its own, a parameter that is not contiguous, a module that
// is called twice, one that is never called, and a tied parameter. Also its training by one process, as a reference.

#include <ATen/ATen.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "tessera/fsdp/fully_sharded_data_parallel.h"

namespace tessera::fsdp {

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(std::int64_t width) {
    up = register_module("up", torch::nn::Linear(width, 2 * width + 1));
    down = register_module("down", torch::nn::Linear(2 * width + 1, width));
  }
  at::Tensor forward(const at::Tensor& x) { return x + down(at::tanh(up(x))); }
  torch::nn::Linear up{nullptr}, down{nullptr};
};
TORCH_MODULE(Block);

struct SmallModelImpl : torch::nn::Module {
  SmallModelImpl() {
    scale = register_parameter("scale", at::ones({5}));
    weight = register_parameter("weight", at::ones({5, 7}).t());
    register_parameter("tied", scale);
    count = register_buffer("count", at::zeros({2}));
    first = register_module("first", Wrap<Block>(7));
    twice = register_module("twice", Wrap<Block>(7));
    inner = register_module("inner", Wrap<torch::nn::Linear>(7, 5));
    never = register_module("never", Wrap<Block>(7));
    head = register_module("head", Wrap<torch::nn::Linear>(5, 3));
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor y = twice(first(at::matmul(x * scale, weight.t())));
    y = twice(y) + y;
    return head(at::tanh(inner(y)) * scale);
  }
  at::Tensor scale, weight, count;
  Wrap<Block> first{nullptr}, twice{nullptr}, never{nullptr};
  Wrap<torch::nn::Linear> inner{nullptr}, head{nullptr};
};
TORCH_MODULE(SmallModel);

// Sets the parameters to the same values on every rank and in every run.
inline void fill(torch::nn::Module& module, at::ScalarType dtype = at::kDouble) {
  module.to(dtype);
  const at::NoGradGuard no_grad;
  double phase = 0;
  for (const at::Tensor& param : module.parameters()) {
    const at::Tensor values = at::arange(param.numel(), at::kDouble).add(phase).mul(0.7).sin().mul(0.4);
    param.detach().copy_(values.reshape(param.sizes()));
    phase += 3;
  }
}

inline SmallModel make_model(at::ScalarType dtype = at::kDouble) {
  SmallModel model;
  fill(*model, dtype);
  return model;
}

// The batch of a rank in a step.
inline at::Tensor batch_of(int step, int rank, at::ScalarType dtype = at::kDouble) {
  return at::arange(20, at::kDouble).add(7 * step + 3 * rank).mul(0.31).cos().reshape({4, 5}).to(dtype);
}
inline at::Tensor loss_of(const at::Tensor& result) { return (result - 0.5).square().mean(); }

inline Options options_of(ShardingStrategy strategy, bool use_orig_params) {
  Options options;
  options.strategy = strategy;
  options.use_orig_params = use_orig_params;
  return options;
}

// The ways to shard a model: with and without flat parameters that a program sees.
inline const Options kWays[] = {
    options_of(ShardingStrategy::full_shard, true), options_of(ShardingStrategy::full_shard, false),
    options_of(ShardingStrategy::shard_grad_op, true), options_of(ShardingStrategy::no_shard, true),
    options_of(ShardingStrategy::no_shard, false)};

inline constexpr int kBatches = 4;  // per step, over all ranks

// Runs backward of the average loss over `batches` batches, which are distributed over any number of ranks. Returns
// that loss. `loss_of_batch` computes the loss of one batch.
template <typename Model, typename Loss>
double backward_of_batches(Model& model, int batches, const Loss& loss_of_batch) {
  model.zero_grad();
  const at::Tensor total = at::zeros({1}, at::kDouble);
  const int ranks = model.group().size();
  const int all = (batches + ranks - 1) / ranks * ranks;
  for (int batch = model.group().rank(); batch < all; batch += ranks) {
    const auto no_sync = model.no_sync(/*off=*/batch + ranks >= all);
    const double weight = batch < batches ? 1.0 : 0.0;  // a rank without a batch computes one with weight 0
    const at::Tensor loss = loss_of_batch(batch) * (weight * ranks / batches);
    loss.backward();
    total.add_(loss.detach() / ranks);
  }
  model.group().all_reduce(total);
  return total.template item<double>();
}

// Returns copies of the full parameters.
inline std::vector<at::Tensor> full_params(ShardedModule& model) {
  std::vector<at::Tensor> params;
  model.summon_full_params([&] {
    for (const at::Tensor& param : model.module_ptr()->parameters()) params.push_back(param.detach().clone());
  });
  return params;
}

// Returns each parameter once, as an optimizer requires.
inline std::vector<at::Tensor> unique_params(const torch::nn::Module& module) {
  std::vector<at::Tensor> params;
  for (const at::Tensor& param : module.parameters()) {
    const auto is_it = [&](const at::Tensor& other) { return other.is_same(param); };
    if (std::none_of(params.begin(), params.end(), is_it)) params.push_back(param);
  }
  return params;
}

// Computes the average gradient over the batches of all ranks, summed in rank order. Returns the ranks' losses.
template <typename Model>
std::vector<double> backward_of_all(Model& model, const std::vector<int>& steps, int ranks) {
  std::vector<double> losses;
  std::vector<std::pair<at::Tensor, at::Tensor>> sums;
  for (int rank = 0; rank < ranks; ++rank) {
    for (const at::Tensor& param : unique_params(*model)) param.mutable_grad().reset();
    double loss = 0;
    for (const int step : steps) {
      const at::Tensor result = loss_of(model->forward(batch_of(step, rank, model->parameters()[0].scalar_type())));
      result.backward();
      loss += result.template item<double>();
    }
    losses.push_back(loss);
    std::size_t i = 0;
    for (const at::Tensor& param : unique_params(*model)) {
      if (rank == 0) sums.emplace_back(param, param.grad().defined() ? param.grad().clone() : at::Tensor());
      if (rank != 0 && param.grad().defined()) sums[i].second.add_(param.grad());
      ++i;
    }
  }
  for (auto& [param, sum] : sums) {
    param.mutable_grad() = sum.defined() ? sum.div_(ranks) : sum;
  }
  return losses;
}

}  // namespace tessera::fsdp
