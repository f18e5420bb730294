#include "tessera/state/async_save.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <condition_variable>
#include <cstring>
#include <mutex>

#include "support/error_matchers.h"
#include "support/temporary_directory.h"
#include "tensor/sharding_support.h"
#include "tessera/checkpoint/faulty_storage.h"
#include "tessera/comm/local_ranks.h"
#include "tessera/state/load.h"
#include "tessera/tensor/dtensor.h"

namespace tessera {
namespace {

using checkpoint::StorageEvent;
using checkpoint::StorageFault;
using checkpoint::StorageStep;
using testing::TemporaryDirectory;

// A storage that blocks until it is released.
class Gate {
 public:
  std::shared_ptr<checkpoint::Storage> storage(const std::filesystem::path& path) {
    return checkpoint::faulty_storage(checkpoint::file_system_storage(path), [this](const StorageEvent& event) {
      std::unique_lock lock(mutex_);
      if (event.step == StorageStep::create) changed_.wait(lock, [&] { return open_; });
      return StorageFault::none;
    });
  }
  void open() {
    const std::lock_guard lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = false;
};

TEST(AsyncSaverTest, WhatIsSavedIsTheStateAsItWas) {
  const TemporaryDirectory directory;
  Gate gate;
  const at::Tensor weight = at::ones({1000});
  StateDict state{{"w", weight}, {"step", 1}};
  AsyncSaver saver;
  const auto future = saver.save(state, gate.storage(directory / "ckpt"));
  EXPECT_TRUE(saver.is_busy());
  weight.fill_(2);
  state["step"] = 2;
  gate.open();
  EXPECT_GT(future.get().written_bytes, 4000u);
  saver.wait();
  EXPECT_FALSE(saver.is_busy());
  EXPECT_EQ(load_full(directory / "ckpt"), (StateDict{{"w", at::ones({1000})}, {"step", 1}}));
}

// Changes every element of a tensor, whatever its dtype.
void spoil(const at::Tensor& tensor) {
  if (tensor.numel() != 0) std::memset(tensor.data_ptr(), 0x01, tensor.nbytes());
}

TEST(AsyncSaverTest, EveryDtypeAndTensorsWithoutElementsAreSavedAsTheyWere) {
  const TemporaryDirectory directory;
  StateDict state, expected;
  for (const at::ScalarType type :
       {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kByte, at::kChar, at::kShort, at::kInt, at::kLong,
        at::kBool, at::kComplexHalf, at::kComplexFloat, at::kComplexDouble}) {
    const at::Tensor bytes = at::arange(0, 24 * static_cast<std::int64_t>(c10::elementSize(type))).to(at::kByte);
    const at::Tensor values = type == at::kBool ? bytes.remainder(2).to(at::kBool) : bytes.view(type);
    state[c10::toString(type)] = values.view({4, 6});
    state[std::string("scalar ") + c10::toString(type)] = values[5].clone();
    state[std::string("empty ") + c10::toString(type)] = at::empty({0, 3}, values.options());
  }
  const at::Tensor base = at::arange(48, at::kFloat).view({6, 8}), one = at::ones({1});
  std::vector<at::Tensor> memory = {base, one};
  for (const auto& [name, value] : state) memory.push_back(value.get<at::Tensor>());
  state["rows"] = base.slice(0, 1, 6, 2);
  state["transposed"] = base.t();
  state["expanded"] = one.expand({3, 2});
  for (const auto& [name, value] : state) expected[name] = value.get<at::Tensor>().clone();
  Gate gate;
  AsyncSaver saver;
  const auto future = saver.save(state, gate.storage(directory / "ckpt"));
  for (const at::Tensor& tensor : memory) spoil(tensor);
  gate.open();
  future.get();
  EXPECT_EQ(load_full(directory / "ckpt"), expected);
}

TEST(AsyncSaverTest, DTensorsAndShardedTensorsAreSavedAsTheyWere) {
  const TemporaryDirectory directory;
  const at::Tensor full = at::arange(42, at::kDouble).view({7, 6});
  run_local(4, [&](const ProcessGroup& group) {
    Gate gate;
    AsyncSaver saver(group);
    const DeviceMesh mesh(group, {2, 2});
    StateDict state;
    std::vector<at::Tensor> locals;
    for (const Placements& placements :
         {Placements{Placement::shard(0), Placement::replicate()}, Placements{Placement::shard(0), Placement::shard(1)},
          Placements{Placement::replicate(), Placement::replicate()}}) {
      const DTensor tensor = distribute_tensor(full, mesh, placements);
      locals.push_back(tensor.local_tensor());
      state[to_string(placements)] = tensor;
    }
    const ShardedTensor sharded = testing::shard(full, testing::chunk_spec(1, {3, 1, 2, 0}), group);
    locals.push_back(sharded.local_tensor());
    state["sharded"] = sharded;
    const auto future = saver.save(state, gate.storage(directory / "ckpt"));
    for (const at::Tensor& local : locals) local.detach().fill_(-1);
    gate.open();
    future.get();
  });
  const StateDict saved = load_full(directory / "ckpt");
  EXPECT_EQ(saved.size(), 4u);
  for (const auto& [name, value] : saved) EXPECT_TRUE(at::equal(value.get<at::Tensor>(), full)) << to_string(name);
}

TEST(AsyncSaverTest, ATensorUnderSeveralNamesIsCopiedOnce) {
  const TemporaryDirectory directory;
  const at::Tensor weight = at::full({100}, 1.0F), other = at::full({100}, 2.0F);
  AsyncSaver saver;
  const auto expect_saved = [&](const StateDict& state, std::uint64_t staged) {
    saver.save(state, directory / "ckpt").get();
    EXPECT_EQ(saver.staging_bytes(), staged);
    EXPECT_EQ(load_full(directory / "ckpt"), state);
  };
  expect_saved({{"in", weight}, {"out", weight}, {"row", weight.view({1, 100})}, {"first", weight.slice(0, 0, 50)}},
               400);
  expect_saved({{"in", weight}, {"out", other}}, 800);  // a buffer of several names serves one of them
  expect_saved({{"in", other}, {"out", other}}, 400);
  expect_saved({{"in", weight}, {"out", weight.to(at::kInt)}}, 800);
}

// PyTorch: test_views and test_complex_storage_sharing of test_state_dict_stager.py.
TEST(AsyncSaverTest, ViewsOfOneStorageAreCopiedTogether) {
  const TemporaryDirectory directory;
  const at::Tensor base = at::arange(100, at::kFloat).view({10, 10}), other = at::arange(16, at::kDouble).view({4, 4});
  const StateDict state{{"base", base},
                        {"view1", base.view(100)},
                        {"view2", base.view({10, 10})},
                        {"slice1", base.slice(0, 2, 8).slice(1, 2, 8)},
                        {"slice2", base.slice(1, 0, 5)},
                        {"slice3", base.view(100).slice(0, 10, 60)},
                        {"nested", Dict{{"other", other}, {"rows", other.narrow(0, 0, 2)}}}};
  StateDict expected{{"nested", Dict{{"other", other.clone()}, {"rows", other.narrow(0, 0, 2).clone()}}}};
  for (const auto& [name, value] : state) {
    if (!value.is<Dict>()) expected[name] = value.get<at::Tensor>().clone();
  }
  Gate gate;
  AsyncSaver saver;
  const auto future = saver.save(state, gate.storage(directory / "ckpt"));
  EXPECT_EQ(saver.staging_bytes(), 400u + 128u);
  base.fill_(-1);
  other.fill_(-1);
  gate.open();
  future.get();
  EXPECT_EQ(load_full(directory / "ckpt"), expected);
}

TEST(AsyncSaverTest, MemoryIsUsedAgainAndPlansAreRemembered) {
  const TemporaryDirectory directory;
  run_local(3, [&](const ProcessGroup& group) {
    AsyncSaver saver(group);
    for (int step = 0; step < 4; ++step) {
      const auto future =
          saver.save({{"w", at::full({1000}, step)}, {"step", step}}, directory / ("step-" + std::to_string(step)));
      EXPECT_EQ(saver.staging_bytes(), 8000u);
      group.barrier();  // the trainer keeps using its own group
      EXPECT_EQ(future.get().plan_was_reused, step > 0);
    }
  });
  for (int step = 0; step < 4; ++step) {
    EXPECT_EQ(load_full(directory / ("step-" + std::to_string(step))),
              (StateDict{{"w", at::full({1000}, step)}, {"step", step}}));
  }
}

TEST(AsyncSaverTest, ASecondSaveWaitsOrIsRefusedOnAllRanks) {
  const TemporaryDirectory directory;
  run_local(2, [&](const ProcessGroup& group) {
    Gate gate;
    AsyncSaveOptions options;
    options.when_busy = AsyncSaveOptions::WhenBusy::refuse;
    AsyncSaver saver(group, options);
    // Only rank 0 blocks. The save is still running, but a rank with nothing to write does not know that.
    const auto first =
        saver.save({{"w", at::ones({2})}}, group.rank() == 0 ? gate.storage(directory / "a")
                                                             : checkpoint::file_system_storage(directory / "a"));
    EXPECT_ERROR(saver.save({{"w", at::ones({2})}}, directory / "b"), ErrorCode::invalid_argument,
                 "the previous save still runs");
    group.barrier();
    gate.open();
    first.get();
    group.barrier();
    saver.wait();
    saver.save({{"w", at::ones({2})}}, directory / "b").get();
  });
  EXPECT_EQ(load_full(directory / "b"), (StateDict{{"w", at::ones({2})}}));
}

std::shared_ptr<checkpoint::Storage> broken(const std::filesystem::path& path) {
  return checkpoint::faulty_storage(checkpoint::file_system_storage(path), [](const StorageEvent& event) {
    return event.step == StorageStep::write ? StorageFault::io_error : StorageFault::none;
  });
}

TEST(AsyncSaverTest, AnErrorIsInTheFutureAndThrownOnceByTheNextCall) {
  const TemporaryDirectory directory;
  const StateDict state{{"w", at::ones({2})}};
  run_local(2, [&](const ProcessGroup& group) {
    AsyncSaver saver(group);
    const auto future = saver.save(state, broken(directory / "a"));
    EXPECT_ERROR(saver.save(state, directory / "b"), ErrorCode::io, "save in the background", "failed on command");
    EXPECT_ERROR(future.get(), ErrorCode::io, "failed on command");
    saver.save(state, directory / "b");
    saver.wait();
    saver.save(state, broken(directory / "a"));
    EXPECT_ERROR(saver.wait(), ErrorCode::io, "failed on command");
    saver.wait();
  });
  EXPECT_EQ(load_full(directory / "b"), state);
}

TEST(AsyncSaverTest, TrainingGoesOnIfThatIsWanted) {
  const TemporaryDirectory directory;
  AsyncSaveOptions options;
  options.throw_at_next_call = false;
  AsyncSaver saver({}, options);
  const StateDict state{{"w", at::ones({2})}};
  const auto future = saver.save(state, broken(directory / "a"));
  saver.save(state, directory / "b");
  saver.wait();
  EXPECT_ERROR(future.get(), ErrorCode::io, "failed on command");
  EXPECT_EQ(load_full(directory / "b"), state);
}

TEST(AsyncSaverTest, WhatCannotBeCopiedIsThrownAtOnceOnAllRanks) {
  run_local(2, [&](const ProcessGroup& group) {
    AsyncSaver saver(group);
    StateDict state{{"w", at::ones({2})}};
    if (group.rank() == 1) state["bad"] = at::ones({2}).to_sparse();
    EXPECT_ERROR(saver.save(state, checkpoint::memory_storage()), ErrorCode::unsupported, "rank 1: save 'bad'");
  });
}

}  // namespace
}  // namespace tessera
