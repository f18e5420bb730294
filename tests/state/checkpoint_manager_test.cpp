#include "tessera/state/checkpoint_manager.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <limits>
#include <mutex>
#include <sstream>

#include "support/error_matchers.h"
#include "support/temporary_directory.h"
#include "tessera/comm/local_ranks.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using testing::TemporaryDirectory;

StateDict state_of(std::int64_t step) { return {{"w", at::full({100}, step, at::kLong)}, {"step", step}}; }

class CheckpointManagerTest : public ::testing::TestWithParam<bool> {
 protected:
  CheckpointManagerOptions options() {
    CheckpointManagerOptions options;
    options.async = GetParam();
    options.warn = [this](const std::string& what) {
      const std::lock_guard lock(mutex_);
      warnings_.push_back(what);
    };
    return options;
  }
  fs::path directory() const { return temporary_ / "checkpoints"; }
  std::vector<std::string> warnings_;

 private:
  TemporaryDirectory temporary_;
  std::mutex mutex_;
};
INSTANTIATE_TEST_SUITE_P(Async, CheckpointManagerTest, ::testing::Bool(),
                         [](const auto& async) { return async.param ? "InTheBackground" : "AtOnce"; });

TEST_P(CheckpointManagerTest, DueStepsAreSavedAndTheNewestIsRestored) {
  run_local(3, [&](const ProcessGroup& group) {
    {
      CheckpointManagerOptions every_third = options();
      every_third.save_every = 3;
      CheckpointManager manager(directory(), group, every_third);
      StateDict state = state_of(0);
      EXPECT_EQ(manager.restore_latest(state), std::nullopt);
      EXPECT_EQ(manager.latest(), std::nullopt);
      for (std::int64_t step = 1; step <= 7; ++step) EXPECT_EQ(manager.save(step, state_of(step)), step % 3 == 0);
      EXPECT_TRUE(manager.save(8, state_of(8), std::nullopt, true));
      manager.wait();
      group.barrier();
      EXPECT_THAT(manager.steps(), ElementsAre(3, 6, 8));
    }
    group.barrier();
    CheckpointManager manager(directory(), group, options());
    StateDict state = state_of(0);
    EXPECT_EQ(manager.restore_latest(state), 8);
    EXPECT_EQ(state, state_of(8));
    manager.restore(3, state);
    EXPECT_EQ(state, state_of(3));
  });
}

TEST_P(CheckpointManagerTest, TheLastAndTheBestAreKept) {
  CheckpointManagerOptions keep = options();
  keep.keep_last = 2;
  keep.keep_best = 2;
  const std::map<std::int64_t, double> losses = {{1, 5}, {2, 1}, {3, 4}, {4, 2}, {5, 3}, {6, 6}, {7, 7}};
  {
    CheckpointManager manager(directory(), {}, keep);
    for (const auto& [step, loss] : losses) manager.save(step, state_of(step), loss);
    manager.wait();
    EXPECT_THAT(manager.steps(), ElementsAre(2, 4, 6, 7));
  }
  // The next job knows the best step as well.
  keep.best = CheckpointManagerOptions::Best::highest;
  CheckpointManager manager(directory(), {}, keep);
  manager.save(8, state_of(8), 0.5);
  manager.save(9, state_of(9));
  manager.wait();
  EXPECT_THAT(manager.steps(), ElementsAre(6, 7, 8, 9));
  EXPECT_TRUE(warnings_.empty());
}

TEST_P(CheckpointManagerTest, AMetricThatIsNotFiniteIsNoneWithAWarning) {
  CheckpointManagerOptions keep = options();
  keep.keep_last = 1;
  keep.keep_best = 1;
  {
    CheckpointManager manager(directory(), {}, keep);
    manager.save(1, state_of(1), 2.0);
    manager.save(2, state_of(2), -std::numeric_limits<double>::infinity());
    manager.save(3, state_of(3), std::numeric_limits<double>::quiet_NaN());
    manager.wait();
    EXPECT_THAT(manager.steps(), ElementsAre(1, 3));
    EXPECT_THAT(warnings_, ElementsAre("the metric of step 2 is -inf, expected a finite number: the step has none",
                                       "the metric of step 3 is nan, expected a finite number: the step has none"));
  }
  std::stringstream metrics;
  metrics << std::ifstream(directory() / "metrics.json").rdbuf();
  EXPECT_THAT(metrics.str(), AllOf(HasSubstr("\"1\": 2.0"), Not(HasSubstr("null"))));
  // Written before such metrics were refused.
  std::ofstream(directory() / "metrics.json") << R"({"1": 2.0, "3": null})";
  CheckpointManager manager(directory(), {}, keep);
  manager.save(4, state_of(4), 3.0);
  manager.wait();
  EXPECT_THAT(manager.steps(), ElementsAre(1, 4));
}

TEST_P(CheckpointManagerTest, WhatCrashedSavesLeftIsRemoved) {
  {
    CheckpointManager manager(directory(), {}, options());
    manager.save(1, state_of(1));
    manager.save(2, state_of(2));
    manager.wait();
  }
  fs::remove(directory() / "step-2" / ".metadata");  // as if the save had not been committed
  fs::create_directory(directory() / "step-3");
  fs::create_directory(directory() / "notes");
  std::ofstream(directory() / "step-x") << "not ours";
  CheckpointManager manager(directory(), {}, options());
  EXPECT_THAT(manager.steps(), ElementsAre(1));
  EXPECT_FALSE(fs::exists(directory() / "step-2"));
  EXPECT_FALSE(fs::exists(directory() / "step-3"));
  EXPECT_TRUE(fs::exists(directory() / "notes"));
  EXPECT_TRUE(fs::exists(directory() / "step-x"));
}

TEST_P(CheckpointManagerTest, WhatNoSaveLeavesStaysWithAWarning) {
  fs::create_directories(directory() / "step-7");
  fs::create_directories(directory() / "step-8" / "model");
  std::ofstream(directory() / "step-7" / "model.safetensors") << "of another format";
  std::ofstream(directory() / "step-8" / "__0_0.distcp") << "of a save";
  CheckpointManager manager(directory(), {}, options());
  EXPECT_THAT(manager.steps(), ElementsAre());
  EXPECT_TRUE(fs::exists(directory() / "step-7" / "model.safetensors"));
  EXPECT_TRUE(fs::exists(directory() / "step-8" / "__0_0.distcp"));
  EXPECT_THAT(warnings_,
              ElementsAre(AllOf(HasSubstr("step-7 has no .metadata and stays"), HasSubstr("'model.safetensors'")),
                          AllOf(HasSubstr("step-8"), HasSubstr("'model'"))));
}

TEST_P(CheckpointManagerTest, ACheckpointThatCannotBeLookedUpIsAnErrorAndStays) {
  { CheckpointManager(directory(), {}, options()).save(1, state_of(1)); }
  const fs::path metadata = directory() / "step-1" / ".metadata";
  const auto spoil = [](const fs::path& path) {  // for root, too: a link to itself
    fs::rename(path, path.string() + ".before");
    fs::create_symlink(path.filename(), path);
  };
  const auto restore = [](const fs::path& path) { fs::rename(path.string() + ".before", path); };
  spoil(metadata);
  EXPECT_ERROR(CheckpointManager(directory(), {}, options()), ErrorCode::io, "stat ", "step-1/.metadata");
  restore(metadata);
  CheckpointManagerOptions keep = options();
  keep.keep_last = keep.keep_best = 1;
  CheckpointManager manager(directory(), {}, keep);
  manager.save(2, state_of(2), 0.5);
  manager.wait();
  manager.save(3, state_of(3), 1.5);
  manager.wait();
  EXPECT_THAT(manager.steps(), ElementsAre(2, 3));
  spoil(directory() / "metrics.json");  // the best step is not known now
  manager.save(4, state_of(4));
  manager.wait();
  restore(directory() / "metrics.json");
  EXPECT_THAT(manager.steps(), ElementsAre(2, 3, 4));
  EXPECT_THAT(warnings_, ElementsAre(AllOf(HasSubstr("stat "), HasSubstr("metrics.json"))));
}

TEST_P(CheckpointManagerTest, ADamagedCheckpointIsPassedOverWithAWarning) {
  run_local(2, [&](const ProcessGroup& group) {
    CheckpointManager manager(directory(), group, options());
    for (std::int64_t step = 1; step <= 4; ++step) manager.save(step, state_of(step));
    manager.wait();
    group.barrier();
    if (group.rank() == 0) {
      testing::put_byte(directory() / "step-4" / "__0_0.distcp", 700, 0x55);  // inside the elements
      fs::remove(directory() / "step-3" / "__0_0.distcp");
    }
    group.barrier();
    StateDict state = state_of(0);
    EXPECT_EQ(manager.restore_latest(state), 2);
    EXPECT_EQ(state, state_of(2));
    group.barrier();
    if (group.rank() == 0) {
      ASSERT_EQ(warnings_.size(), 2u);
      EXPECT_THAT(warnings_[0], HasSubstr("skipped the damaged checkpoint of step 4: "));
      EXPECT_THAT(warnings_[0], HasSubstr("__0_0.distcp at byte 0"));
      EXPECT_THAT(warnings_[1], HasSubstr("step 3"));
      EXPECT_THAT(warnings_[1], HasSubstr("is missing"));
      fs::remove(directory() / "step-2" / "__0_0.distcp");
      fs::resize_file(directory() / "step-1" / ".metadata", 10);
    }
    group.barrier();
    EXPECT_ERROR(manager.restore_latest(state), ErrorCode::corrupt,
                 "all 4 checkpoints are damaged, expected an intact one; the newest: ");
  });
}

TEST_P(CheckpointManagerTest, AStateThatDoesNotFitIsNoDamage) {
  CheckpointManager manager(directory(), {}, options());
  manager.save(1, state_of(1));
  manager.save(2, state_of(2));
  manager.wait();
  StateDict other{{"w", at::zeros({7}, at::kLong)}};
  EXPECT_ERROR(manager.restore_latest(other), ErrorCode::invalid_argument, "has shape [100]");
  StateDict missing{{"v", at::zeros({7}, at::kLong)}};
  EXPECT_ERROR(manager.restore_latest(missing), ErrorCode::not_found, "no 'v'");
}

TEST(CheckpointManagerOptionsTest, Refusals) {
  const TemporaryDirectory directory;
  CheckpointManagerOptions options;
  options.save_every = 0;
  EXPECT_ERROR(CheckpointManager(directory.path(), {}, options), ErrorCode::invalid_argument, "save_every is 0");
  options = {};
  options.keep_last = 0;
  EXPECT_ERROR(CheckpointManager(directory.path(), {}, options), ErrorCode::invalid_argument, "keep_last is 0");
  EXPECT_ERROR(CheckpointManager(directory.path()).save(-1, {}), ErrorCode::invalid_argument, "save of step -1");
}

}  // namespace
}  // namespace tessera
