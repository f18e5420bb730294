// The memory of a device that FSDP takes, from the allocator's statistics, which count each byte.

#include <torch/optim/sgd.h>

#include <cstdlib>

#include "accelerator/fsdp_training.h"

namespace tessera::fsdp {
namespace {

constexpr std::size_t kBlocks = 6;
constexpr std::int64_t kWidth = 64, kHidden = 2 * kWidth + 1, kRows = 4;

std::size_t float_bytes(std::int64_t count) { return static_cast<std::size_t>((4 * count + 511) / 512 * 512); }

// Of a block, two linear layers, and of the head, which belongs to the model's own unit.
constexpr std::int64_t kBlockNumel = 2 * kWidth * kHidden + kHidden + kWidth, kHeadNumel = kWidth * 5 + 5;

// The most memory that a step takes. Backward has computed blocks kBlocks - 1 to i when it takes most, for some i.
std::size_t stated_peak(std::size_t max_prefetched) {
  const std::size_t unit = float_bytes(kBlockNumel), head = float_bytes(kHeadNumel);
  const std::size_t unit_shard = float_bytes(kBlockNumel / 2), head_shard = float_bytes(kHeadNumel / 2);
  const std::size_t shards = kBlocks * unit_shard + head_shard;
  // The results of a block, of its first layer, and of its tanh.
  const std::size_t activations = float_bytes(kRows * kWidth) + 2 * float_bytes(kRows * kHidden);
  const std::size_t weight_gradient = float_bytes(kWidth * kHidden);
  std::size_t peak = 0;
  for (std::size_t i = 0; i < kBlocks; ++i) {
    const std::size_t done = kBlocks - 1 - i;
    const std::size_t gradients = done * unit_shard + head;  // the model's own unit is reduced last
    // The full gradient of block i, and that of the block before, which is reduced.
    const std::size_t reducing = (1 + std::min<std::size_t>(done, 1)) * unit;
    // What is gathered ahead, and the memory of the unit that was freed last.
    const std::size_t units = (1 + std::min(max_prefetched, i + 1)) * unit + head;
    peak = std::max(peak, shards + gradients + units + reducing + weight_gradient + (i + 1) * activations);
  }
  return peak;
}

struct Peak {
  std::size_t built = 0, before = 0, in_step = 0, after = 0;
};

Peak measured(const ProcessGroup& group, at::Device device, const Options& options, std::size_t blocks,
              std::int64_t width, int steps) {
  Peak peak;
  Stack stack(static_cast<int>(blocks), width);
  fill(*stack, at::kFloat);
  FullyShardedDataParallel<Stack> model(stack, group, options);
  torch::optim::SGD optimizer(model.parameters(), torch::optim::SGDOptions(0.01));
  const at::Tensor x = at::ones({kRows, width}).to(device);
  peak.built = sim::memory_statistics(device.index()).allocated_bytes;
  for (int step = 0; step < steps; ++step) {
    if (step == steps - 1) {
      peak.before = sim::memory_statistics(device.index()).allocated_bytes;
      sim::reset_peak(device.index());
    }
    optimizer.zero_grad();
    const at::Tensor loss = loss_of(model(x));
    loss.backward();
    optimizer.step();
    if (step % 10 == 0) loss.item<float>();  // the device catches up
  }
  peak.in_step = sim::memory_statistics(device.index()).peak_bytes;
  optimizer.zero_grad();
  peak.after = sim::memory_statistics(device.index()).allocated_bytes;
  return peak;
}

class FsdpDeviceMemoryTest : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Prefetched, FsdpDeviceMemoryTest, ::testing::Values(1, 2, 3));

TEST_P(FsdpDeviceMemoryTest, APeakIsShardsGradientsUnitsAndActivations) {
  run_on_devices(2, [](const ProcessGroup& group, at::Device device) {
    Options options = options_of(ShardingStrategy::full_shard, true);
    options.device = device;
    options.max_prefetched_units = GetParam();
    const Peak peak = measured(group, device, options, kBlocks, kWidth, 3);
    // Gradients that were reset are freed in the next forward, all else of a step at its end.
    const std::size_t gradients = kBlocks * float_bytes(kBlockNumel / 2) + float_bytes(kHeadNumel / 2);
    EXPECT_EQ(peak.after, peak.built + gradients);
    const std::size_t found = peak.in_step;
    const std::size_t stated = stated_peak(static_cast<std::size_t>(GetParam()));
    EXPECT_LE(found, stated + stated / 50);
    EXPECT_GE(found, stated - stated / 16);
  });
}

TEST(FsdpDeviceMemoryTest, AThousandStepsTakeNoMore) {
  run_on_devices(2, [](const ProcessGroup& group, at::Device device) {
    Options options = options_of(ShardingStrategy::full_shard, true);
    options.device = device;
    const Peak first = measured(group, device, options, 2, 8, 3);
    const Peak last = measured(group, device, options, 2, 8, 1000);
    EXPECT_EQ(last.before, first.before);
    EXPECT_EQ(last.in_step, first.in_step);
    EXPECT_EQ(last.after, first.after);
  });
}

}  // namespace
}  // namespace tessera::fsdp
