// FSDP on the simulated accelerator, over a backend with NCCL's semantics, trains as on CPU, bit for bit, and the host
// does not wait for the device in a step.

#include "accelerator/fsdp_training.h"
#include "fsdp/training_cases.h"
#include "tessera/fsdp/saved_tensors.h"

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

class FsdpMemoryOnDeviceTest : public sim::InOrder {};
INSTANTIATE_TEST_SUITE_P(, FsdpMemoryOnDeviceTest, ::testing::Values(sim::Order::late, sim::Order::early),
                         sim::order_name);

TEST_P(FsdpMemoryOnDeviceTest, ShardsOnTheCpuMayBeWrittenAfterASummon) {
  Stack expected;
  fill(*expected, at::kFloat);
  run_on_devices(2, [&](const ProcessGroup& group, at::Device device) {
    Options options = options_of(ShardingStrategy::full_shard, true);
    options.offload_params = true;
    Stack stack;
    fill(*stack, at::kFloat);
    stack->to(device);
    FullyShardedDataParallel<Stack> model(stack, group, options);
    std::vector<at::Tensor> copies;
    const auto copy = [&] {
      for (const at::Tensor& param : stack->parameters()) copies.push_back(param.detach().clone());
    };
    model.summon_full_params(copy, {.writeback = false});
    for (const at::Tensor& shard : model.parameters()) shard.detach().fill_(7);
    const std::vector<at::Tensor> params = expected->parameters();
    ASSERT_EQ(copies.size(), params.size());
    for (std::size_t i = 0; i < copies.size(); ++i) EXPECT_TRUE(at::equal(copies[i].cpu(), params[i])) << i;
  });
}

TEST_P(FsdpMemoryOnDeviceTest, FrozenParametersAreNotCopiedToTheCpuWithActivations) {
  run_on_devices(2, [&](const ProcessGroup& group, at::Device device) {
    Stack stack;
    fill(*stack, at::kFloat);
    stack->to(device);
    for (const Wrap<Block>& block : stack->blocks) {
      for (const at::Tensor& param : block->parameters()) param.set_requires_grad(false);
    }
    FullyShardedDataParallel<Stack> model(stack, group);
    int of_params = 0;
    const PackHook on_cpu = save_on_cpu();
    const SavedTensorHooks hooks([&](const at::Tensor& saved) {
      const auto unpack = on_cpu(saved);
      for (std::size_t i = 0; i < model.unit_count(); ++i) {
        for (const at::Tensor& flat : model.handle(i).unsharded_flat_params()) {
          if (!saved.is_alias_of(flat)) continue;
          ++of_params;
          EXPECT_TRUE(unpack().is_alias_of(flat)) << model.unit_name(i);
        }
      }
      return unpack;
    });
    loss_of(model(batch_on(device, 0, group.rank()).requires_grad_())).backward();
    EXPECT_GE(of_params, 2 * static_cast<int>(stack->blocks.size()));
  });
}

}  // namespace
}  // namespace tessera::fsdp
