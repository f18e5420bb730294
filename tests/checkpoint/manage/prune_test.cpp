#include "tessera/checkpoint/manage/prune.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <unistd.h>

#include "checkpoint/manage/runs.h"
#include "support/error_matchers.h"
#include "support/system_calls.h"
#include "tessera/base/function_ref.h"
#include "tessera/checkpoint/manage/run_directory.h"
#include "tessera/checkpoint/verify.h"
#include "tessera/format/dcp_metadata.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;
using ::tessera::testing::FileChange;
using ::tessera::testing::KilledRun;
using ::tessera::testing::run_killed_at_change;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;

class PruneTest : public runs::RunTest {
 protected:
  std::vector<std::string> names() const {
    std::vector<std::string> found;
    for (const auto& entry : fs::directory_iterator(run())) found.push_back(entry.path().filename().string());
    std::ranges::sort(found);
    return found;
  }
  PruneReport prune_with(std::size_t keep, FunctionRef<void(PruneOptions&)> set = nullptr) const {
    PruneOptions options;
    options.keep = keep;
    if (set) set(options);
    return prune(run(), options);
  }
  static std::vector<std::string> removed_in(const PruneReport& report) {
    std::vector<std::string> found;
    for (const PrunedEntry& entry : report.removed) found.push_back(entry.name);
    return found;
  }
};

TEST_F(PruneTest, TheNewestCompleteStepsAndMultiplesAreKept) {
  for (const char* name : {"step-9", "step-10", "step-20", "step-30", "step-100"}) add_dcp(name);
  const PruneReport report = prune_with(2, [](PruneOptions& options) { options.every = 10; });
  EXPECT_THAT(removed_in(report), ElementsAre("step-9"));
  EXPECT_THAT(names(), ElementsAre("step-10", "step-100", "step-20", "step-30"));
  EXPECT_EQ(removed_in(prune_with(2)), (std::vector<std::string>{"step-10", "step-20"}));
  EXPECT_THAT(names(), ElementsAre("step-100", "step-30"));
  EXPECT_THAT(removed_in(prune_with(2)), IsEmpty());
}

TEST_F(PruneTest, TheNewestCompleteStepIsKeptWhateverIsNewer) {
  for (const char* name : {"step-1", "step-2", "step-3", "step-4"}) add_dcp(name);
  fs::remove(run() / "step-4/.metadata");
  fs::remove(run() / "step-1/.metadata");
  EXPECT_THAT(removed_in(prune_with(1)), ElementsAre("step-2"));
  EXPECT_THAT(names(), ElementsAre("step-1", "step-3", "step-4"));
  const PruneReport report = prune_with(1, [](PruneOptions& options) { options.incomplete = true; });
  EXPECT_THAT(removed_in(report), ElementsAre("step-1"));
  ASSERT_EQ(report.kept.size(), 2u);
  EXPECT_EQ(report.kept[0].why, "newest");
  EXPECT_THAT(report.kept[1].why, HasSubstr("newer than the newest complete step"));
}

// A save writes the index after all shards.
TEST_F(PruneTest, AStepWithFewerShardsThanTheirNamesAnnounceIsNotComplete) {
  add_dcp("step-1");
  fs::create_directory(run() / "step-2");
  fs::copy(runs::golden_safetensors_file(), run() / "step-2/model-00001-of-00002.safetensors");
  add_torch("step-3/pytorch_model-00002-of-00002.bin");
  EXPECT_THAT(removed_in(prune_with(1)), IsEmpty());
  const RunDirectory listed = list_run(run());
  ASSERT_EQ(listed.entries.size(), 3u);
  EXPECT_EQ(listed.newest_complete, 0u);
  EXPECT_THAT(listed.entries[1].problem, HasSubstr("'model-00002-of-00002.safetensors'"));
  EXPECT_THAT(listed.entries[2].problem, HasSubstr("'pytorch_model-00001-of-00002.bin' is missing"));
  fs::copy(runs::golden_checkpoint("2.14-hf"), run() / "step-4", fs::copy_options::recursive);
  add_torch("step-5/pytorch_model-00001-of-00002.bin");
  add_torch("step-5/pytorch_model-00002-of-00002.bin");
  EXPECT_EQ(list_run(run()).newest_complete, 4u);
}

// Ranks that save without collectives each write their own metadata.
TEST_F(PruneTest, AStepWithoutTheMetadataOfARankIsNotComplete) {
  for (const char* name : {"step-1", "step-2"}) add_dcp(name);
  const fs::path path = run() / "step-2/.metadata";
  dcp::Metadata metadata = dcp::read(File::open_read(path));
  for (dcp::MetadataEntry& entry : metadata.entries) {
    if (!entry.is_tensor || entry.items.size() < 2) continue;
    entry.chunks = BoxList({Box(entry.chunks[0])});
    entry.items.resize(1);
  }
  fs::remove(path);
  write_new_file(run() / "step-2/__0.metadata", dcp::write(metadata));
  EXPECT_THAT(removed_in(prune_with(1)), IsEmpty());
  EXPECT_THAT(list_run(run()).entries.at(1).problem, HasSubstr("expected chunks that cover it"));
}

TEST_F(PruneTest, NothingIsRemovedIfNoStepIsComplete) {
  for (const char* name : {"step-1", "step-2"}) {
    add_dcp(name);
    fs::remove(run() / name / ".metadata");
  }
  EXPECT_THAT(removed_in(prune_with(1, [](PruneOptions& options) { options.incomplete = true; })), IsEmpty());
}

TEST_F(PruneTest, WhatIsNoStepOfAKnownFormatStays) {
  add_dcp("step-100");
  add_dcp("best-model");
  add_text("step-1/train.log", "no checkpoint");
  add_text("step-2.bin", "no checkpoint either");
  add_text("step-3.txt", "");
  fs::create_directory(run() / "tmp-step-4");
  fs::create_directory(run() / "5");
  const auto before = names();
  EXPECT_THAT(removed_in(prune_with(1, [](PruneOptions& options) { options.incomplete = true; })), IsEmpty());
  EXPECT_EQ(names(), before);
}

TEST_F(PruneTest, LinksAreNotFollowedAndWhatTheyReferToStays) {
  const testing::TemporaryDirectory elsewhere;
  fs::copy(runs::golden_checkpoint("2.14-optim"), elsewhere / "ck", fs::copy_options::recursive);
  for (const char* name : {"step-2", "step-3", "step-4", "step-5", "step-6"}) add_dcp(name);
  fs::create_directory_symlink(elsewhere / "ck", run() / "step-1");
  fs::create_directory_symlink("step-2", run() / "best");
  fs::create_directory_symlink(elsewhere.path(), run() / "step-3/outside");
  add_text("latest", "step-4\n");
  add_text("latest_checkpointed_iteration.txt", "5");
  EXPECT_THAT(removed_in(prune_with(1)), ElementsAre("step-3"));
  EXPECT_TRUE(verify(elsewhere / "ck").good());
  EXPECT_TRUE(fs::is_symlink(run() / "step-1"));
  EXPECT_TRUE(verify(run() / "best").good());
}

TEST_F(PruneTest, WhatAWriterIsAtStays) {
  for (const char* name : {"step-1", "step-9"}) add_dcp(name);
  for (const char* name :
       {".step-2.tessera-1-0.partial", ".step-3.tessera-1-0.partial", "step-1/.model.pt.tessera-1-0.partial"}) {
    fs::create_directory(run() / name);
  }
  std::vector<int> locks;
  for (const char* name : {".step-2.tessera-1-0.partial", "step-1/.model.pt.tessera-1-0.partial"}) {
    locks.push_back(::open((run() / name).c_str(), O_RDONLY | O_DIRECTORY));
    ASSERT_EQ(::flock(locks.back(), LOCK_EX), 0);
  }
  const auto everything = [](PruneOptions& options) { options.incomplete = true; };
  EXPECT_THAT(removed_in(prune_with(1, everything)), ElementsAre(".step-3.tessera-1-0.partial"));
  for (const int lock : locks) ::close(lock);
  EXPECT_THAT(removed_in(prune_with(1, everything)), ElementsAre("step-1", ".step-2.tessera-1-0.partial"));
}

TEST_F(PruneTest, NumbersOfEpochsAndOfStepsAreNotCompared) {
  add_torch("epoch=3.ckpt");
  add_torch("step-1.pt");
  EXPECT_ERROR(prune_with(1), ErrorCode::invalid_argument, "'step-1.pt' and 'epoch=3.ckpt'", "names of one kind");
  EXPECT_ERROR(prune_with(0), ErrorCode::invalid_argument, "keep is 0, expected at least 1");
  EXPECT_ERROR(prune_with(1, [](PruneOptions& options) { options.every = 0; }), ErrorCode::invalid_argument,
               "every is 0");
}

TEST_F(PruneTest, AnIncompleteStepOfAnotherUnitMayBeTheNewest) {
  for (const char* name : {"step-100", "epoch-3", "step-1"}) add_dcp(name);
  for (const char* name : {"epoch-3", "step-1"}) fs::remove(run() / name / ".metadata");
  fs::create_directory(run() / ".epoch-4.tessera-1-0.partial");
  const PruneReport report = prune_with(1, [](PruneOptions& options) { options.incomplete = true; });
  EXPECT_THAT(removed_in(report), ElementsAre("step-1"));
  ASSERT_EQ(report.kept.size(), 3u);
  for (const std::size_t i : {0u, 1u}) {
    EXPECT_THAT(report.kept[i].why, HasSubstr("cannot be compared with that of 'step-100'")) << report.kept[i].name;
  }
}

TEST_F(PruneTest, ADryRunReportsTheSameAndRemovesNothing) {
  for (const char* name : {"step-1", "step-2", "step-3"}) add_dcp(name);
  const auto before = names();
  std::size_t calls = 0;
  const PruneReport planned = prune_with(1, [&](PruneOptions& options) {
    options.dry_run = true;
    options.removed = [&](const PrunedEntry&) { ++calls; };
  });
  EXPECT_EQ(names(), before);
  EXPECT_EQ(calls, 2u);
  const PruneReport done = prune_with(1);
  EXPECT_EQ(removed_in(done), removed_in(planned));
  EXPECT_EQ(done.freed_bytes, planned.freed_bytes);
  EXPECT_GT(done.freed_bytes, 0u);
}

TEST_F(PruneTest, AFilesSidecarGoesWithIt) {
  for (const char* name : {"step-1.safetensors", "step-2.safetensors"}) {
    fs::copy(runs::golden_safetensors_file(), run() / name);
    add_text(std::string(name) + ".tessera.json", "{}");
  }
  prune_with(1);
  EXPECT_THAT(names(), ElementsAre("step-2.safetensors", "step-2.safetensors.tessera.json"));
}

// --- kills

class PruneKillTest : public PruneTest {
 protected:
  void SetUp() override {
    for (const char* name : {"step-1", "step-3"}) add_dcp(name);
    fs::copy(runs::golden_safetensors_file(), run() / "step-2.safetensors");
    add_text("step-2.safetensors.tessera.json", "{\"version\": 1, \"files\": {}}");
  }
  KilledRun prune_until(std::size_t change) const {
    return run_killed_at_change(change, [&] { prune_with(1); });
  }
};

TEST_F(PruneKillTest, EachStepIsCompleteOrGoneAndTheNextPruneDeletesTheRest) {
  std::size_t kills = 0;
  for (;; ++kills) {
    const testing::TemporaryDirectory copy;
    fs::copy(run(), copy / "run", fs::copy_options::recursive);
    const KilledRun killed = run_killed_at_change(kills, [&] {
      PruneOptions options;
      prune(copy / "run", options);
    });
    SCOPED_TRACE(kills);
    const RunDirectory listed = list_run(copy / "run");
    for (const RunEntry& entry : listed.entries) {
      EXPECT_TRUE(entry.complete || entry.kind == RunEntry::Kind::removed) << entry.name << ": " << entry.problem;
    }
    ASSERT_TRUE(listed.newest_complete);
    EXPECT_EQ(listed.entries[*listed.newest_complete].name, "step-3");
    EXPECT_TRUE(verify(copy / "run/step-3").good());
    prune(copy / "run", {});
    std::vector<std::string> left;
    for (const auto& entry : fs::directory_iterator(copy / "run")) left.push_back(entry.path().filename().string());
    EXPECT_THAT(left, ElementsAre("step-3"));
    if (!killed.was_killed) {
      EXPECT_EQ(killed.status, 0);
      break;
    }
  }
  EXPECT_GT(kills, 10u);
}

TEST_F(PruneKillTest, NothingIsDeletedBeforeItsNewNameIsDurable) {
  const KilledRun all = prune_until(SIZE_MAX);
  EXPECT_FALSE(all.was_killed);
  bool is_durable = true;
  std::size_t renames = 0, removals = 0;
  for (const FileChange change : all.changes) {
    if (change == FileChange::rename) {
      is_durable = false;
      ++renames;
    } else if (change == FileChange::sync) {
      is_durable = true;
    } else if (change == FileChange::remove) {
      EXPECT_TRUE(is_durable);
      ++removals;
    }
  }
  EXPECT_EQ(renames, 3u);
  EXPECT_GT(removals, 5u);
}

}  // namespace
}  // namespace tessera::checkpoint
