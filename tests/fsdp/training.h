#pragma once
// Training with FSDP on a device of choice, for comparison with the CPU: one model, many options.

#include <torch/nn/modules/container/sequential.h>
#include <torch/optim/adamw.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "fsdp/small_model.h"
#include "tessera/base/function_ref.h"
#include "tessera/fsdp/activation_checkpoint.h"
#include "tessera/fsdp/sharded_grad_scaler.h"

namespace tessera::fsdp {

// Blocks, so that units are gathered ahead and their memory is handed out again.
struct StackImpl : torch::nn::Module {
  explicit StackImpl(int count = 4, std::int64_t width = 7) {
    for (int i = 0; i < count; ++i) blocks.push_back(register_module("block" + std::to_string(i), Wrap<Block>(width)));
    head = register_module("head", torch::nn::Linear(width, 5));
  }
  at::Tensor forward(at::Tensor x) {
    for (Wrap<Block>& block : blocks) x = block(x);
    return head(x);
  }
  std::vector<Wrap<Block>> blocks;
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(Stack);

struct Training {
  const char* name;
  ShardingStrategy strategy = ShardingStrategy::full_shard;
  std::function<void(Options& options)> change = [](Options&) {};
  std::int64_t accumulated = 1;    // backwards in a step
  bool computes_again = false;     // activation checkpointing
  bool is_scaled = false;          // by a ShardedGradScaler
  bool changes_between = false;    // parameters are changed in summon_full_params after each step
  bool evaluates_between = false;  // forward without a graph after each step
  bool writes_between = false;   // then parameters are changed in place, which the host does at once if they are on CPU
  bool unshards_before = false;  // by hand, before the forward of a step
  bool syncs_each = false;       // gradients are reduced in each of the accumulated backwards
  bool begins_on_side_stream = false;  // the first step is on another stream, as the gradients of parameters then are
  int steps = 3;
  at::ScalarType dtype = at::kFloat;  // of the parameters

  int ranks() const { return is_hybrid(strategy) ? 4 : 2; }
};

struct Trained {
  std::vector<at::Tensor> results;  // losses, norms and at the end the full parameters
  std::int64_t host_waits = 0;      // in forward, backward, clipping and the optimizer's step, after the first step
};

inline at::Tensor batch_on(at::Device device, int step, int rank, at::ScalarType dtype = at::kFloat) {
  return at::arange(28, dtype).add(7 * step + 3 * rank).mul(0.31).cos().view({4, 7}).to(device);
}

// `count_waits` returns how often the host has waited for the device of this rank. What `enter_first_step` returns
// exists during the first step.
inline Trained train(const ProcessGroup& group, at::Device device, const Training& training,
                     FunctionRef<std::int64_t()> count_waits = nullptr,
                     FunctionRef<std::shared_ptr<void>()> enter_first_step = nullptr) {
  Trained trained;
  std::optional<HybridGroups> hybrid;
  Options options = options_of(training.strategy, true);
  if (is_hybrid(training.strategy)) {
    hybrid = hybrid_groups(group, 2);
    options.replicas = hybrid->replicas;
  }
  training.change(options);
  Stack stack;
  fill(*stack, training.dtype);
  if (training.computes_again) apply_activation_checkpointing(*stack, is_any_of<BlockImpl>);
  stack->to(device);
  FullyShardedDataParallel<Stack> model(stack, hybrid ? hybrid->shards : group, options);
  torch::optim::AdamW optimizer(model.parameters(), torch::optim::AdamWOptions(0.05));
  ShardedGradScaler scaler(group, {.init_scale = 1024, .enabled = training.is_scaled});
  std::vector<at::Tensor> batches;
  for (int i = 0; i < training.steps * training.accumulated; ++i) {
    batches.push_back(batch_on(device, i, group.rank(), training.dtype));
  }
  const auto forward = [&](std::size_t batch) { return loss_of(model(batches[batch]).to(training.dtype)); };
  std::shared_ptr<void> entered = enter_first_step ? enter_first_step() : nullptr;
  std::size_t batch = 0;
  for (int step = 0; step < training.steps; ++step) {
    if (step == 1) entered.reset();
    const std::int64_t waits_before = count_waits ? count_waits() : 0;
    optimizer.zero_grad();
    if (training.unshards_before) model.unshard();
    for (std::int64_t k = 0; k < training.accumulated; ++k) {
      const auto no_sync = model.no_sync(/*off=*/training.syncs_each || k + 1 == training.accumulated);
      const at::Tensor loss = forward(batch++);
      scaler.scale(loss).backward();
      trained.results.push_back(loss.detach());
    }
    if (training.is_scaled) scaler.unscale_(optimizer);
    trained.results.push_back(model.clip_grad_norm_(0.5));
    if (training.is_scaled) {
      scaler.step(optimizer);
      scaler.update();
    } else {
      optimizer.step();
    }
    if (count_waits && step != 0) trained.host_waits += count_waits() - waits_before;
    if (training.evaluates_between) {
      const at::NoGradGuard no_grad;
      trained.results.push_back(forward(batch - 1));
    }
    if (training.writes_between) {
      for (const at::Tensor& param : model.parameters()) param.detach().mul_(1.25);
    }
    if (training.changes_between) {
      model.summon_full_params([&] {
        for (const at::Tensor& param : model.parameters()) param.detach().mul_(1.25);
      });
    }
  }
  for (const auto& entry : model.state_dict(StateDictType::full, {.rank0_only = false})) {
    trained.results.push_back(entry.value.get<at::Tensor>());
  }
  for (at::Tensor& result : trained.results) result = result.cpu();
  return trained;
}

}  // namespace tessera::fsdp
