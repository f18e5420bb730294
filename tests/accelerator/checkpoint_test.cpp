// Checkpoints of tensors on the simulated accelerator.

#include <cstdlib>
#include <cstring>
#include <thread>

#include "accelerator/fsdp_training.h"
#include "state/device_states.h"
#include "state/transport/device_staging.h"
#include "state/transport/spans.h"
#include "support/temporary_directory.h"
#include "tessera/state/async_save.h"
#include "tessera/state/load.h"
#include "tessera/state/save.h"

namespace tessera {
namespace {

using fsdp::run_on_devices;
using testing::change;
using testing::expect_equal;
using testing::separate_state_on;
using testing::state_on;
using testing::TemporaryDirectory;

class DeviceCheckpointTest : public sim::InOrder {
 protected:
  const at::Device on_device = sim::device(0);
  const TemporaryDirectory directory;
  const std::filesystem::path path = directory.path() / "checkpoint";
};
INSTANTIATE_TEST_SUITE_P(, DeviceCheckpointTest, ::testing::Values(sim::Order::late, sim::Order::early),
                         sim::order_name);

TEST_P(DeviceCheckpointTest, ASaveHasWhatWasComputedBeforeOnTheCurrentStream) {
  const c10::StreamGuard guard(sim::stream_from_pool());
  testing::expect_saves_in_order(on_device, path);
}

TEST_P(DeviceCheckpointTest, TheHostDoesNotWaitForTheCopiesOfASaveInTheBackground) {
  AsyncSaver saver;
  const c10::StreamGuard guard(sim::stream_from_pool());
  const StateDict state = state_on(on_device), expected = state_on(at::kCPU);
  for (int i = 0; i < 3; ++i) {
    change(state);
    change(expected);
    const StateDict before = state_on(at::kCPU);
    for (const auto& entry : expected) before.at(entry.key).get<at::Tensor>().copy_(entry.value.get<at::Tensor>());
    sim::reset_synchronizations(0);
    const auto saved = saver.save(state, path);
    EXPECT_EQ(sim::synchronizations(0).total(), 0);
    change(state);  // comes after the copies
    change(expected);
    saved.get();
    expect_equal(load_full(path), before);
  }
  expect_equal(state, expected);
}

TEST_P(DeviceCheckpointTest, WhatChangesAfterACopyWaitsForIt) {
  const at::Tensor x = at::arange(1000).to(on_device);
  HostCopies memory;
  const std::vector<HostCopy> copies = memory.copy({x});
  x.mul_(2);
  EXPECT_EQ(x.cpu()[3].item<std::int64_t>(), 6);  // runs the current stream
  copies[0].copied.synchronize();
  EXPECT_TRUE(at::equal(copies[0].elements, at::arange(1000)));
}

TEST_P(DeviceCheckpointTest, ALoadIsOrderedBetweenTheWorkOnTheCurrentStream) {
  const StateDict saved = state_on(at::kCPU);
  save(saved, path);
  const c10::StreamGuard guard(sim::stream_from_pool());
  for (const std::uint64_t limit : {std::uint64_t{1}, std::uint64_t{256} << 20}) {
    StateDict state = separate_state_on(on_device);
    change(state);  // overwritten by the load
    LoadOptions options;
    options.staging_bytes = limit;
    load(state, path, {}, options);
    const StateDict expected = separate_state_on(at::kCPU);
    change(state);
    change(expected);
    expect_equal(state, expected);
  }
}

TEST_P(DeviceCheckpointTest, AThreadThatFreesABlockUsesNoOtherDevice) {
  constexpr std::int64_t kLarge = 5 << 20;  // more than a block has
  const at::Tensor small = at::zeros({64}, sim::on(1, at::kByte)), large = at::zeros({kLarge}, sim::on(1, at::kByte));
  const std::int64_t before = sim::destroyed_events(0);
  {
    const c10::DeviceGuard guard(sim::device(1));
    DeviceStaging staging(sim::device(1), 1);
    std::thread([&] {  // its current device is 0
      staging.write(small, [](std::uint8_t* elements) { std::memset(elements, 1, 64); });
      staging.write(large, [](std::uint8_t* elements) { std::memset(elements, 2, kLarge); });
    })
        .join();
  }
  EXPECT_EQ(sim::destroyed_events(0), before);
  EXPECT_EQ(small.sum().item<std::int64_t>(), 64);
  EXPECT_EQ(large.sum().item<std::int64_t>(), 2 * kLarge);
}

TEST_P(DeviceCheckpointTest, AShardedModelIsSavedOnDevicesAndResumesOnOthers) {
  const auto train_step = [](auto& model, auto& optimizer, const ProcessGroup& group, at::Device device, int step) {
    optimizer.zero_grad();
    fsdp::loss_of(model(fsdp::batch_on(device, step, group.rank()))).backward();
    optimizer.step();
  };
  const auto state_of = [](auto& model, auto& optimizer) {
    return StateDict{{"model", model.state_dict()}, {"optim", model.optim_state_dict(optimizer)}};
  };
  std::vector<at::Tensor> expected, resumed;
  // Two steps, a save in the background during a third, and a load on `device`.
  const auto run = [&](const ProcessGroup& group, at::Device device, bool resumes, std::vector<at::Tensor>& results) {
    fsdp::Stack stack;
    fsdp::fill(*stack, at::kFloat);
    stack->to(device);
    fsdp::FullyShardedDataParallel<fsdp::Stack> model(stack, group);
    torch::optim::AdamW optimizer(model.parameters(), torch::optim::AdamWOptions(0.05));
    AsyncSaver saver(group);
    if (resumes) {
      train_step(model, optimizer, group, device, 7);  // so that the optimizer has a state
      StateDict state = state_of(model, optimizer);
      load(state, path, group);
      model.load_state_dict(state.at("model").template get<Dict>());
      model.load_optim_state_dict(optimizer, state.at("optim").template get<Dict>());
    } else {
      for (int step = 0; step < 2; ++step) train_step(model, optimizer, group, device, step);
      saver.save(state_of(model, optimizer), path);
    }
    train_step(model, optimizer, group, device, 2);
    saver.wait();
    const StateDict full = model.state_dict(fsdp::StateDictType::full);
    for (const auto& entry : full) results.push_back(entry.value.template get<at::Tensor>().cpu());
  };
  std::vector<std::vector<at::Tensor>> saved(2), on_devices(2), on_cpu(2);
  const auto of_rank = [](auto& all, const ProcessGroup& group) -> auto& {
    return all[static_cast<std::size_t>(group.rank())];
  };
  run_on_devices(2, [&](const ProcessGroup& group, at::Device of) { run(group, of, false, of_rank(saved, group)); });
  run_on_devices(2,
                 [&](const ProcessGroup& group, at::Device of) { run(group, of, true, of_rank(on_devices, group)); });
  run_local(2, [&](const ProcessGroup& group) { run(group, at::kCPU, true, of_rank(on_cpu, group)); });
  ASSERT_FALSE(saved[0].empty());
  for (std::size_t i = 0; i < saved[0].size(); ++i) {
    EXPECT_TRUE(at::equal(on_devices[0][i], saved[0][i])) << i;
    EXPECT_TRUE(at::equal(on_cpu[0][i], saved[0][i])) << i;
  }
}

}  // namespace
}  // namespace tessera
