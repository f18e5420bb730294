// FSDP on the simulated accelerator, over a backend with NCCL's semantics, trains as on CPU, bit for bit, and the host
// does not wait for the device in a step.

#include "accelerator/fsdp_training.h"
#include "fsdp/training_cases.h"

namespace tessera::fsdp {
namespace {

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
    on_device[static_cast<std::size_t>(group.rank())] = train_on_device(group, device, training);
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
