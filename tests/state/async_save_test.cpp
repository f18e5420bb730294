#include "tessera/state/async_save.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <condition_variable>
#include <mutex>

#include "support/error_matchers.h"
#include "support/temporary_directory.h"
#include "tessera/checkpoint/faulty_storage.h"
#include "tessera/comm/local_ranks.h"
#include "tessera/state/load.h"

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
