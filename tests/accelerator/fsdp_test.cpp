// FSDP on the simulated accelerator, over a backend with NCCL's semantics, trains as on CPU, bit for bit, and the host
// does not wait for the device in a step.

#include "accelerator/fsdp_training.h"

namespace tessera::fsdp {
namespace {

void with_flat_params(Options& options) { options.use_orig_params = false; }
void in_bfloat16(Options& options) { options.mixed_precision.param_dtype = at::kBFloat16; }
void reduced_in_bfloat16(Options& options) {
  options.mixed_precision.reduce_dtype = at::kBFloat16;
  options.mixed_precision.keep_low_precision_grads = false;
}
void offloaded(Options& options) { options.offload_params = true; }
void offloaded_in_bfloat16(Options& options) {
  offloaded(options);
  in_bfloat16(options);
}
void far_ahead(Options& options) { options.max_prefetched_units = 3; }
void without_forward_prefetch(Options& options) { options.forward_prefetch = false; }
void prefetched_after(Options& options) { options.backward_prefetch = BackwardPrefetch::post; }
void not_prefetched(Options& options) {
  options.backward_prefetch = BackwardPrefetch::none;
  options.forward_prefetch = false;
}

using enum ShardingStrategy;
const std::vector<Training> trainings{
    {.name = "full_shard"},
    {.name = "flat_params", .change = with_flat_params},
    {.name = "bfloat16", .change = in_bfloat16},
    {.name = "reduced_in_bfloat16", .change = reduced_in_bfloat16, .accumulated = 2},
    {.name = "accumulated", .accumulated = 2},
    {.name = "prefetched_after", .change = prefetched_after},
    {.name = "not_prefetched", .change = not_prefetched},
    {.name = "far_ahead", .change = far_ahead},
    {.name = "without_forward_prefetch", .change = without_forward_prefetch},
    {.name = "shard_grad_op", .strategy = shard_grad_op},
    {.name = "shard_grad_op_bfloat16", .strategy = shard_grad_op, .change = in_bfloat16, .accumulated = 2},
    {.name = "no_shard", .strategy = no_shard},
    {.name = "no_shard_flat_params", .strategy = no_shard, .change = with_flat_params, .accumulated = 2},
    {.name = "no_shard_bfloat16", .strategy = no_shard, .change = in_bfloat16},
    {.name = "hybrid_shard", .strategy = hybrid_shard},
    {.name = "hybrid_shard_bfloat16", .strategy = hybrid_shard, .change = in_bfloat16, .accumulated = 2},
    {.name = "hybrid_shard_zero2", .strategy = hybrid_shard_zero2, .accumulated = 2},
    {.name = "offloaded", .change = offloaded},
    {.name = "offloaded_accumulated", .change = offloaded, .accumulated = 3},
    {.name = "offloaded_bfloat16", .change = offloaded_in_bfloat16, .accumulated = 2},
    {.name = "offloaded_grad_op", .strategy = shard_grad_op, .change = offloaded, .evaluates_between = true},
    {.name = "offloaded_no_shard", .strategy = no_shard, .change = offloaded},
    {.name = "offloaded_hybrid", .strategy = hybrid_shard, .change = offloaded, .accumulated = 2},
    {.name = "offloaded_changed", .change = offloaded, .changes_between = true, .evaluates_between = true},
    {.name = "checkpointed", .computes_again = true},
    {.name = "checkpointed_bfloat16", .change = in_bfloat16, .accumulated = 2, .computes_again = true},
    {.name = "checkpointed_grad_op", .strategy = shard_grad_op, .computes_again = true},
    {.name = "checkpointed_offloaded", .change = offloaded, .computes_again = true},
    {.name = "scaled", .is_scaled = true},
    {.name = "scaled_bfloat16_hybrid", .strategy = hybrid_shard, .change = in_bfloat16, .is_scaled = true},
    {.name = "scaled_offloaded", .change = offloaded, .is_scaled = true},
    {.name = "changed", .changes_between = true, .evaluates_between = true},
    {.name = "changed_bfloat16", .change = in_bfloat16, .changes_between = true, .evaluates_between = true},
    {.name = "changed_no_shard", .strategy = no_shard, .changes_between = true, .evaluates_between = true},
};

// The host has to wait for gradients that an optimizer reads on the CPU, for shards there that it is to write, and to
// decide whether the optimizer steps.
bool lets_the_host_wait(const Training& training) {
  Options options;
  training.change(options);
  return options.offload_params || training.is_scaled;
}

using FsdpOnDeviceTest = ::testing::TestWithParam<std::tuple<sim::Order, std::size_t>>;
INSTANTIATE_TEST_SUITE_P(, FsdpOnDeviceTest,
                         ::testing::Combine(::testing::Values(sim::Order::late, sim::Order::early),
                                            ::testing::Range<std::size_t>(0, trainings.size())),
                         [](const auto& param) {
                           return std::string(trainings[std::get<1>(param.param)].name) +
                                  (std::get<0>(param.param) == sim::Order::late ? "_late" : "_early");
                         });

TEST_P(FsdpOnDeviceTest, TrainsAsOnCpuAndTheHostDoesNotWait) {
  const auto [order, index] = GetParam();
  const Training training = trainings[index];
  std::vector<Trained> on_cpu(static_cast<std::size_t>(training.ranks())), on_device(on_cpu.size());
  use_accelerator();
  sim::set_order(order);
  run_local(training.ranks(), [&](const ProcessGroup& group) {
    on_cpu[static_cast<std::size_t>(group.rank())] = train(group, at::kCPU, training);
  });
  run_on_devices(training.ranks(), [&](const ProcessGroup& group, at::Device device) {
    on_device[static_cast<std::size_t>(group.rank())] = train(group, device, training);
  });
  for (std::size_t rank = 0; rank < on_cpu.size(); ++rank) {
    ASSERT_EQ(on_device[rank].results.size(), on_cpu[rank].results.size());
    for (std::size_t i = 0; i < on_cpu[rank].results.size(); ++i) {
      EXPECT_TRUE(at::equal(on_device[rank].results[i], on_cpu[rank].results[i]))
          << "rank " << rank << ", result " << i << ": " << on_device[rank].results[i] << ", on CPU "
          << on_cpu[rank].results[i];
    }
    if (lets_the_host_wait(training)) continue;
    EXPECT_EQ(on_device[rank].host_waits, 0) << "rank " << rank;
  }
}

}  // namespace
}  // namespace tessera::fsdp
