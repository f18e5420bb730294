// The memory that a rank takes at its peak, compared with what docs/memory.md states for each strategy, with and
// without memory that ranks share. Ranks are processes. What libraries allocate once does not count: a small model is
// trained before.

#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <malloc.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "support/rank_processes.h"
#include "tessera/base/internal/process_memory.h"
#include "tessera/comm/internal/shared_memory.h"
#include "tessera/fsdp/fully_sharded_data_parallel.h"
#include "tessera/fsdp/meta_init.h"

namespace tessera::fsdp {
namespace {

constexpr std::int64_t kBlockWidth = 768, kBlockCount = 48, kRows = 32, kMiB = 1 << 20;

struct ReluLinearImpl : torch::nn::Module {
  ReluLinearImpl() : linear(register_module("linear", torch::nn::Linear(kBlockWidth, kBlockWidth))) {}
  at::Tensor forward(const at::Tensor& x) { return at::relu(linear(x)); }
  torch::nn::Linear linear;
};
TORCH_MODULE(ReluLinear);

struct MemoryCase {
  std::string name;
  ShardingStrategy strategy;
  int ranks;
  bool has_adamw = false;
  bool is_on_meta = false;
  bool shares_memory = true;
};

void PrintTo(const MemoryCase& test, std::ostream* out) { *out << test.name; }

torch::nn::Sequential make_stack(std::int64_t blocks, bool on_meta) {
  std::optional<MetaInit> without_memory;
  if (on_meta) without_memory.emplace();
  torch::nn::Sequential stack;
  for (std::int64_t i = 0; i < blocks; ++i) stack->push_back(Wrap<ReluLinear>());
  return stack;
}

using ShardedBlocks = FullyShardedDataParallel<torch::nn::Sequential>;

// Returns the bytes that this rank has taken at its peak since `before`, which it had then.
std::int64_t peak_since(std::uint64_t before) { return static_cast<std::int64_t>(peak_own_memory_bytes() - before); }

// Trains a model that was built in memory of its own, which malloc has returned to the system. In its heap, what
// training takes would lie here and there between what is left, and each place counts once it was used.
std::int64_t training_peak(const MemoryCase& test, const ProcessGroup& group, const Options& options,
                           std::int64_t blocks) {
  const std::uint64_t before = own_memory_bytes();
  ::mallopt(M_MMAP_THRESHOLD, kMiB);
  ShardedBlocks model(make_stack(blocks, test.is_on_meta), group, options);
  forget_peak_memory();
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  if (test.has_adamw) {
    optimizer = std::make_unique<torch::optim::AdamW>(model.parameters());
  } else {
    optimizer = std::make_unique<torch::optim::SGD>(model.parameters(), torch::optim::SGDOptions(0.01));
  }
  for (int step = 0; step < 3; ++step) {
    model.zero_grad();
    model(at::ones({kRows, kBlockWidth})).square().mean().backward();
    optimizer->step();
  }
  const std::int64_t peak = peak_since(before);
  group.barrier();  // until then the ranks share the parameters
  return peak;
}

// Builds the model in malloc's heap, which keeps what is freed.
std::int64_t building_peak(const MemoryCase& test, const ProcessGroup& group, const Options& options) {
  forget_peak_memory();
  const std::uint64_t before = own_memory_bytes();
  ::mallopt(M_MMAP_THRESHOLD, 32 * kMiB);
  const ShardedBlocks model(make_stack(kBlockCount, test.is_on_meta), group, options);
  return peak_since(before);
}

// In bytes, of a rank.
struct Peaks {
  std::int64_t building = 0, training = 0;
};

// docs/memory.md, for this model.
Peaks stated(const MemoryCase& test, const ProcessGroup& group) {
  const std::int64_t shard_ranks = group.size();
  const bool shares_memory = comm::SharedMemory::is_available(group);
  const std::int64_t unit = 4 * kBlockWidth * (kBlockWidth + 1), params = kBlockCount * unit;
  const std::int64_t states = test.has_adamw ? 2 * params : 0, activations = kBlockCount * 2 * 4 * kRows * kBlockWidth;
  const std::int64_t parts = is_sharded(test.strategy) ? shard_ranks : 1;
  const bool gathers_all = is_sharded(test.strategy) && !reshards_after_forward(test.strategy) && !shares_memory;
  const std::int64_t units = !is_sharded(test.strategy) ? 2 : shares_memory ? 3 : 7;
  const std::int64_t kept = gathers_all ? (params + states) / parts + params : (2 * params + states) / parts;
  return {(test.is_on_meta ? params / parts : params) + 2 * unit + 16 * kMiB, kept + units * unit + activations};
}

class FsdpMemoryTest : public ::testing::TestWithParam<MemoryCase> {};
INSTANTIATE_TEST_SUITE_P(
    Strategies, FsdpMemoryTest,
    ::testing::Values(MemoryCase{"FullShard", ShardingStrategy::full_shard, 2},
                      MemoryCase{"FullShardAdamWMeta", ShardingStrategy::full_shard, 2, true, true},
                      MemoryCase{"ShardGradOp", ShardingStrategy::shard_grad_op, 2, false, true},
                      MemoryCase{"NoShard", ShardingStrategy::no_shard, 2, false, true},
                      MemoryCase{"HybridShard", ShardingStrategy::hybrid_shard, 4},
                      MemoryCase{"HybridShardZero2", ShardingStrategy::hybrid_shard_zero2, 4},
                      MemoryCase{"FullShardApart", ShardingStrategy::full_shard, 2, false, false, false},
                      MemoryCase{"ShardGradOpApart", ShardingStrategy::shard_grad_op, 2, false, true, false}),
    [](const auto& test) { return test.param.name; });

TEST_P(FsdpMemoryTest, APeakIsWhatTheFormulaStates) {
  ::setenv("TESSERA_HOST_MEMORY", GetParam().shares_memory ? "1" : "0", /*replace=*/1);
  const auto outcomes = testing::run_processes(GetParam().ranks, InitOptions(), [](const ProcessGroup& group) {
    at::set_num_threads(1);
    Options options;
    options.strategy = GetParam().strategy;
    options.param_init_fn = [](torch::nn::Module& module) {
      if (auto* linear = module.as<torch::nn::LinearImpl>()) linear->reset_parameters();
    };
    std::optional<HybridGroups> hybrid;
    if (is_hybrid(options.strategy)) options.replicas = hybrid.emplace(hybrid_groups(group, 2)).replicas;
    const ProcessGroup& shards = hybrid ? hybrid->shards : group;
    training_peak(GetParam(), shards, options, 2);
    const std::int64_t training = training_peak(GetParam(), shards, options, kBlockCount);
    const std::int64_t building = building_peak(GetParam(), shards, options);
    const Peaks formula = stated(GetParam(), shards);
    const auto is_within = [](std::int64_t bytes, std::int64_t of) { return bytes <= of + of / 10 + 8 * kMiB; };
    if (is_within(building, formula.building) && is_within(training, formula.training)) return std::string("good");
    return fmt::format("{} MiB while it was built, expected {}; {} MiB in training, expected {}", building / kMiB,
                       formula.building / kMiB, training / kMiB, formula.training / kMiB);
  });
  for (const testing::RankOutcome& outcome : outcomes) EXPECT_EQ(outcome.report, "good");
}

}  // namespace
}  // namespace tessera::fsdp
