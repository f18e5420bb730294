// Checkpoints of tensors on a GPU: they are saved and loaded to the bit, in the order of the current stream.

#include <torch/optim/adamw.h>

#include <cstdlib>

#include "device/gpu.h"
#include "fsdp/training.h"
#include "state/device_states.h"
#include "support/temporary_directory.h"
#include "tessera/comm/internal/streams.h"
#include "tessera/state/async_save.h"
#include "tessera/state/load.h"
#include "tessera/state/save.h"

namespace tessera {
namespace {

using testing::change;
using testing::expect_equal;
using testing::Ranks;
using testing::run_on_gpus;
using testing::separate_state_on;
using testing::state_on;
using testing::TemporaryDirectory;

class GpuCheckpointTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const auto reason = testing::missing_gpu()) GTEST_SKIP() << *reason;
    device = testing::gpu_of(0);
  }
  at::Device device = at::kCPU;
  const TemporaryDirectory directory;
  const std::filesystem::path path = directory.path() / "checkpoint";
};

TEST_F(GpuCheckpointTest, ASaveHasWhatWasComputedBeforeOnTheCurrentStream) {
  const comm::SideStream side(device);
  const comm::OnStream guard(side);
  testing::expect_saves_in_order(device, path);
}

TEST_F(GpuCheckpointTest, ASaveInTheBackgroundHasTheStateOfItsCall) {
  AsyncSaver saver;
  const comm::SideStream side(device);
  const comm::OnStream guard(side);
  const StateDict state = state_on(device), expected = state_on(at::kCPU);
  for (int i = 0; i < 5; ++i) {
    change(state);
    change(expected);
    const StateDict before = state_on(at::kCPU);
    for (const auto& entry : expected) before.at(entry.key).get<at::Tensor>().copy_(entry.value.get<at::Tensor>());
    const auto saved = saver.save(state, path);
    change(state);  // while the save runs
    change(expected);
    saved.get();
    expect_equal(load_full(path), before);
  }
  expect_equal(state, expected);
}

TEST_F(GpuCheckpointTest, ALoadIsOrderedBetweenTheWorkOnTheCurrentStream) {
  save(state_on(at::kCPU), path);
  const comm::SideStream side(device);
  const comm::OnStream guard(side);
  for (const std::uint64_t limit : {std::uint64_t{1}, std::uint64_t{256} << 20}) {
    StateDict state = separate_state_on(device);
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

class GpuResumeTest : public ::testing::TestWithParam<Ranks> {};
INSTANTIATE_TEST_SUITE_P(, GpuResumeTest, ::testing::ValuesIn(testing::kAllRanks), testing::ranks_name);

TEST_P(GpuResumeTest, AShardedModelIsSavedWhileItTrainsAndResumes) {
  if (const auto reason = GetParam().missing(2)) GTEST_SKIP() << *reason;
  const TemporaryDirectory directory;
  const std::filesystem::path path = directory.path() / "checkpoint";
  run_on_gpus(GetParam(), 2, [&](const ProcessGroup& group, at::Device device) {
    const auto train_step = [&](auto& model, auto& optimizer, at::Device where, int step) {
      optimizer.zero_grad();
      fsdp::loss_of(model(fsdp::batch_on(where, step, group.rank()))).backward();
      optimizer.step();
    };
    const auto run = [&](at::Device where, bool resumes) {
      fsdp::Stack stack;
      fsdp::fill(*stack, at::kFloat);
      stack->to(where);
      fsdp::FullyShardedDataParallel<fsdp::Stack> model(stack, group);
      torch::optim::AdamW optimizer(model.parameters(), torch::optim::AdamWOptions(0.05));
      const auto state_of = [&] {
        return StateDict{{"model", model.state_dict()}, {"optim", model.optim_state_dict(optimizer)}};
      };
      AsyncSaver saver(group);
      if (resumes) {
        train_step(model, optimizer, where, 7);  // so that the optimizer has a state
        StateDict state = state_of();
        load(state, path, group);
        model.load_state_dict(state.at("model").template get<Dict>());
        model.load_optim_state_dict(optimizer, state.at("optim").template get<Dict>());
      } else {
        for (int step = 0; step < 2; ++step) train_step(model, optimizer, where, step);
        saver.save(state_of(), path);
      }
      std::vector<at::Tensor> values;
      for (const at::Tensor& param : fsdp::full_params(model)) values.push_back(param.cpu());
      train_step(model, optimizer, where, 2);  // while the save runs
      saver.wait();
      for (const at::Tensor& param : fsdp::full_params(model)) values.push_back(param.cpu());
      return values;
    };
    const std::vector<at::Tensor> saved = run(device, false), resumed = run(device, true), on_cpu = run(at::kCPU, true);
    const std::size_t params = saved.size() / 2;
    for (std::size_t i = 0; i < saved.size(); ++i) {
      EXPECT_TRUE(at::equal(resumed[i], saved[i])) << i;  // the step after it, too
      if (i < params) {
        EXPECT_TRUE(at::equal(on_cpu[i], saved[i])) << i;
      } else {
        testing::expect_close(on_cpu[i], saved[i], 1e-3, "on CPU, parameter " + std::to_string(i - params));
      }
    }
  });
}

}  // namespace
}  // namespace tessera
