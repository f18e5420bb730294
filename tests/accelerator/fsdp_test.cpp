// FSDP on the simulated accelerator, over a backend with NCCL's semantics, trains as on CPU, bit for bit, and the host
// does not wait for the device in a step.

#include <torch/nn/modules/container/sequential.h>
#include <torch/optim/adamw.h>

#include "accelerator/sim.h"
#include "comm/backend/backend.h"
#include "fsdp/small_model.h"
#include "support/accelerator/nccl/backend.h"
#include "tessera/comm/local_ranks.h"

namespace tessera::fsdp {
namespace {

comm::Transport make_backend(const comm::BackendOptions& options) {
  comm::Transport transport;
  transport.name = "sim";
  transport.backend = c10::make_intrusive<sim::NcclBackend>(options.store, options.rank, options.size);
  transport.is_on_stream = true;
  return transport;
}

void use_accelerator() {
  sim::install();
  static const bool registered = (comm::register_backend("sim", make_backend), true);
  (void)registered;
}

// Four blocks, so that units are gathered ahead and their memory is handed out again.
struct StackImpl : torch::nn::Module {
  StackImpl() {
    for (int i = 0; i < 4; ++i) blocks.push_back(register_module("block" + std::to_string(i), Wrap<Block>(7)));
    head = register_module("head", torch::nn::Linear(7, 5));
  }
  at::Tensor forward(at::Tensor x) {
    for (Wrap<Block>& block : blocks) x = block(x);
    return head(x);
  }
  std::vector<Wrap<Block>> blocks;
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(Stack);

struct Case {
  ShardingStrategy strategy = ShardingStrategy::full_shard;
  bool use_orig_params = true, is_mixed = false;
  std::int64_t accumulated = 1;
  BackwardPrefetch prefetch = BackwardPrefetch::pre;
};

Options options_of(const Case& value, const ProcessGroup& group, std::optional<HybridGroups>& hybrid) {
  Options options = options_of(value.strategy, value.use_orig_params);
  options.backward_prefetch = value.prefetch;
  if (value.is_mixed) options.mixed_precision.param_dtype = at::kBFloat16;
  if (is_hybrid(value.strategy)) {
    hybrid = hybrid_groups(group, 2);
    options.replicas = hybrid->replicas;
  }
  return options;
}

struct Trained {
  std::vector<at::Tensor> results;
  std::int64_t synchronizations = 0;
};

// Trains three steps on `device`. Returns the losses, norms and full parameters, and how often the host waited for the
// device in the steps after the first.
Trained train(const ProcessGroup& group, at::Device device, const Case& value) {
  Trained trained;
  std::optional<HybridGroups> hybrid;
  const Options options = options_of(value, group, hybrid);
  Stack stack;
  fill(*stack, at::kFloat);
  stack->to(device);
  FullyShardedDataParallel<Stack> model(stack, hybrid ? hybrid->shards : group, options);
  torch::optim::AdamW optimizer(model.parameters(), torch::optim::AdamWOptions(0.05));
  std::vector<at::Tensor> batches;
  for (int i = 0; i < 6; ++i)
    batches.push_back(at::arange(28, at::kFloat).add(7 * i + 3 * group.rank()).mul(0.31).cos().view({4, 7}).to(device));
  for (int step = 0; step < 3; ++step) {
    if (step == 1 && !device.is_cpu()) sim::reset_synchronizations(device.index());
    optimizer.zero_grad();
    for (std::int64_t k = 0; k < value.accumulated; ++k) {
      const auto no_sync = model.no_sync(/*off=*/k + 1 == value.accumulated);
      const at::Tensor loss = loss_of(model(batches[static_cast<std::size_t>(step + 3 * k)]).to(at::kFloat));
      loss.backward();
      trained.results.push_back(loss.detach());
    }
    trained.results.push_back(model.clip_grad_norm_(0.5));
    optimizer.step();
  }
  if (!device.is_cpu()) trained.synchronizations = sim::synchronizations(device.index()).total();
  for (const auto& entry : model.state_dict(StateDictType::full, {.rank0_only = false})) {
    trained.results.push_back(entry.value.get<at::Tensor>());
  }
  for (at::Tensor& result : trained.results) result = result.cpu();
  return trained;
}

const std::vector<Case> cases{
    {ShardingStrategy::full_shard},
    {ShardingStrategy::full_shard, false},
    {ShardingStrategy::full_shard, true, true},
    {ShardingStrategy::full_shard, true, false, 2},
    {ShardingStrategy::full_shard, true, false, 1, BackwardPrefetch::post},
    {ShardingStrategy::full_shard, true, false, 1, BackwardPrefetch::none},
    {ShardingStrategy::shard_grad_op},
    {ShardingStrategy::shard_grad_op, true, true, 2},
    {ShardingStrategy::no_shard},
    {ShardingStrategy::no_shard, true, true},
    {ShardingStrategy::hybrid_shard},
    {ShardingStrategy::hybrid_shard_zero2, true, false, 2},
};

using FsdpOnDeviceTest = ::testing::TestWithParam<std::tuple<sim::Order, std::size_t>>;
INSTANTIATE_TEST_SUITE_P(Cases, FsdpOnDeviceTest,
                         ::testing::Combine(::testing::Values(sim::Order::late, sim::Order::early),
                                            ::testing::Range<std::size_t>(0, cases.size())));

TEST_P(FsdpOnDeviceTest, TrainsAsOnCpuAndTheHostDoesNotWait) {
  const auto [order, index] = GetParam();
  const Case value = cases[index];
  const int ranks = is_hybrid(value.strategy) ? 4 : 2;
  std::vector<Trained> on_cpu(static_cast<std::size_t>(ranks)), on_device(on_cpu.size());
  use_accelerator();
  sim::set_order(order);
  run_local(ranks, [&](const ProcessGroup& group) {
    on_cpu[static_cast<std::size_t>(group.rank())] = train(group, at::kCPU, value);
  });
  run_local(ranks,
            [&](const ProcessGroup& group) {
              const at::Device device = sim::device(group.rank());
              const c10::DeviceGuard guard(device);
              on_device[static_cast<std::size_t>(group.rank())] = train(group, device, value);
            },
            {.backend = "sim"});
  for (std::size_t rank = 0; rank < on_cpu.size(); ++rank) {
    ASSERT_EQ(on_device[rank].results.size(), on_cpu[rank].results.size());
    for (std::size_t i = 0; i < on_cpu[rank].results.size(); ++i) {
      EXPECT_TRUE(at::equal(on_device[rank].results[i], on_cpu[rank].results[i]))
          << "rank " << rank << ", result " << i;
    }
    EXPECT_EQ(on_device[rank].synchronizations, 0) << "rank " << rank;
  }
}

}  // namespace
}  // namespace tessera::fsdp
