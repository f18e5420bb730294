#include "tessera/checkpoint/manage/run_directory.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <unistd.h>

#include "checkpoint/manage/runs.h"
#include "support/error_matchers.h"
#include "tessera/checkpoint/internal/file_names.h"
#include "tessera/checkpoint/verify.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;
using runs::RunTest;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(StepNameTest, TesserasNameIsRead) {
  for (const std::int64_t step : {std::int64_t{0}, std::int64_t{7}, std::int64_t{999'999'999'999'999'999}}) {
    EXPECT_EQ(parse_step_name(step_name(step)), (StepName{step, "step"}));
  }
}

TEST(StepNameTest, NamesOfOtherTrainersAreRead) {
  EXPECT_EQ(parse_step_name("step_100"), (StepName{100, "step"}));
  EXPECT_EQ(parse_step_name("step00100.pt"), (StepName{100, "step"}));
  EXPECT_EQ(parse_step_name("checkpoint-100"), (StepName{100, "checkpoint"}));
  EXPECT_EQ(parse_step_name("ckpt_5.safetensors"), (StepName{5, "checkpoint"}));
  EXPECT_EQ(parse_step_name("iter_0000100"), (StepName{100, "iter"}));
  EXPECT_EQ(parse_step_name("global_step100"), (StepName{100, "global_step"}));
  EXPECT_EQ(parse_step_name("epoch=3-step=100.ckpt"), (StepName{100, "step"}));
  EXPECT_EQ(parse_step_name("epoch=3-step=100-val_loss=0.25-v1.ckpt"), (StepName{100, "step"}));
  EXPECT_EQ(parse_step_name("epoch=03.ckpt"), (StepName{3, "epoch"}));
  EXPECT_EQ(parse_step_name("epoch_3"), (StepName{3, "epoch"}));
  EXPECT_EQ(parse_step_name("1000"), (StepName{1000, ""}));
}

TEST(StepNameTest, OtherNamesAreNone) {
  for (const char* name : {"", "step", "step-", "step--1", "step-1x", "step-1 ", "step-1.txt", "step-1.tessera.json",
                           "last.ckpt", "best", "epoch=", "loss=0.5", "step-1234567890123456789", "xstep-1", "-1",
                           ".step-1", "step-1.safetensors.tessera.json", "model-00001-of-00002.safetensors"}) {
    EXPECT_EQ(parse_step_name(name), std::nullopt) << name;
  }
}

TEST(HiddenNameTest, WhatIsWrittenIsRead) {
  const HiddenName name = {"step-1.tessera-x", 12, 3};
  EXPECT_EQ(parse_staging_name(staging_name(name)), name);
  EXPECT_EQ(parse_removed_name(removed_name(name)), name);
  EXPECT_EQ(parse_removed_name(staging_name(name)), std::nullopt);
  for (const char* other : {".x.tessera-1-2", ".x.tessera-1.partial", "x.tessera-1-2.partial", "..tessera-1-2.partialx",
                            ".x.tessera-a-2.partial", ".tessera-1-2.partial"}) {
    EXPECT_EQ(parse_staging_name(other), std::nullopt) << other;
  }
}

const RunEntry& entry_of(const RunDirectory& run, const std::string& name) {
  for (const RunEntry& entry : run.entries) {
    if (entry.name == name) return entry;
  }
  ADD_FAILURE() << "no entry " << name;
  return run.entries.at(0);
}

TEST_F(RunTest, StepsOfEachFormatAreListedInOrderOfTheirNumbers) {
  add_dcp("step-1000");
  add_dcp("step-20");
  fs::copy(runs::golden_safetensors_file(), run() / "step-3.safetensors");
  add_torch("step-400.pt");
  fs::copy(runs::golden_checkpoint("2.14-hf"), run() / "step_500", fs::copy_options::recursive);
  add_torch("step-600/mp_rank_00/model_optim_rng.pt");
  add_text("notes.txt", "not a step");
  add_text("events/step-5.log", "not a step");
  const RunDirectory listed = list_run(run());
  std::vector<std::string> names;
  for (const RunEntry& entry : listed.entries) {
    names.push_back(entry.name);
    EXPECT_TRUE(entry.complete) << entry.name << ": " << entry.problem;
    EXPECT_EQ(entry.problem, "");
    EXPECT_GT(entry.size_bytes, 100u);
    EXPECT_GT(entry.modified_s, 1'000'000'000);
  }
  EXPECT_THAT(names, ElementsAre("step-3.safetensors", "step-20", "step-400.pt", "step_500", "step-600", "step-1000"));
  EXPECT_EQ(listed.newest_complete, 5u);
  EXPECT_EQ(entry_of(listed, "step-20").format, SourceKind::dcp);
  EXPECT_EQ(entry_of(listed, "step-20").ranks, 4u);
  EXPECT_EQ(entry_of(listed, "step-3.safetensors").format, SourceKind::safetensors);
  EXPECT_EQ(entry_of(listed, "step-3.safetensors").ranks, std::nullopt);
  EXPECT_EQ(entry_of(listed, "step_500").format, SourceKind::safetensors);
  EXPECT_EQ(entry_of(listed, "step-400.pt").format, SourceKind::torch);
  EXPECT_EQ(entry_of(listed, "step-600").format, SourceKind::torch);
}

TEST_F(RunTest, WhatIsWrongWithAStepIsNamedAndTheNewestCompleteOneIsAnother) {
  add_dcp("step-1");
  for (const char* name : {"step-2", "step-3", "step-4"}) add_dcp(name);
  fs::remove(run() / "step-2/.metadata");
  fs::remove(run() / "step-3/__1_0.distcp");
  fs::resize_file(run() / "step-4/__0_0.distcp", 1000);
  add_torch("step-5.pt");
  fs::resize_file(run() / "step-5.pt", 200);
  fs::copy(runs::golden_safetensors_file(), run() / "step-6.safetensors");
  fs::resize_file(run() / "step-6.safetensors", fs::file_size(run() / "step-6.safetensors") - 1);
  add_torch("step-7/optimizer.pt");
  fs::resize_file(run() / "step-7/optimizer.pt", 200);
  fs::create_directory(run() / "step-8");
  add_text("step-9.bin", "this is no checkpoint at all");
  const RunDirectory listed = list_run(run());
  ASSERT_EQ(listed.entries.size(), 9u);
  EXPECT_EQ(listed.newest_complete, 0u);
  const std::vector<std::pair<std::string, std::string>> expected = {
      {"step-2", "no .metadata, expected both; the save was never completed"},
      {"step-3", "'__1_0.distcp' is missing, expected it for '"},
      {"step-4", "'__0_0.distcp' ends at byte 1000, before the data of"},
      {"step-5.pt", "byte"},
      {"step-6.safetensors", "byte"},
      {"step-7", "optimizer.pt"}};
  for (const auto& [name, problem] : expected) {
    const RunEntry& entry = entry_of(listed, name);
    EXPECT_FALSE(entry.complete);
    EXPECT_TRUE(entry.format) << name;
    EXPECT_THAT(entry.problem, HasSubstr(problem));
    EXPECT_THAT(entry.problem, ::testing::Not(HasSubstr(run().string()))) << "the path is known where it is shown";
  }
  for (const char* name : {"step-8", "step-9.bin"}) {
    EXPECT_EQ(entry_of(listed, name).problem, "no checkpoint in it");
    EXPECT_FALSE(entry_of(listed, name).format);
  }
}

TEST_F(RunTest, LinksStagingAndInterruptedRemovalsAreNamed) {
  add_dcp("step-1");
  fs::create_directory_symlink("step-1", run() / "step-2");
  for (const char* name : {".step-3.tessera-1-0.partial", ".step-4.tessera-1-0.partial", "tmp-checkpoint-5",
                           "step-6.tmp", ".step-7.tessera-1-0.removed"}) {
    fs::create_directory(run() / name);
  }
  const int lock = ::open((run() / ".step-4.tessera-1-0.partial").c_str(), O_RDONLY | O_DIRECTORY);
  ASSERT_EQ(::flock(lock, LOCK_EX), 0);
  const RunDirectory listed = list_run(run());
  ::close(lock);
  ASSERT_EQ(listed.entries.size(), 7u);
  EXPECT_EQ(listed.newest_complete, 0u);
  using Kind = RunEntry::Kind;
  EXPECT_EQ(listed.entries[1].kind, Kind::link);
  EXPECT_THAT(listed.entries[1].problem, HasSubstr("a symbolic link to step-1"));
  for (std::size_t i = 2; i < 6; ++i) {
    EXPECT_EQ(listed.entries[i].kind, Kind::staging);
    EXPECT_EQ(listed.entries[i].of.step, static_cast<std::int64_t>(i) + 1);
    EXPECT_EQ(listed.entries[i].in_use, i == 3) << listed.entries[i].name;
  }
  EXPECT_EQ(listed.entries[6].kind, Kind::removed);
  EXPECT_EQ(listed.entries[6].of.step, 7);
}

TEST_F(RunTest, VerifyingFindsDamageThatSizesDoNotShow) {
  add_dcp("step-1");
  add_dcp("step-2");
  testing::put_byte(run() / "step-2/__0_0.distcp", 900, 0x55);
  add_torch("step-3/optimizer.pt");
  testing::put_byte(run() / "step-3/optimizer.pt", fs::file_size(run() / "step-3/optimizer.pt") / 2, 0x55);
  RunDirectory listed = list_run(run());
  EXPECT_TRUE(listed.entries[1].complete);
  const bool looked_complete = listed.entries[2].complete;
  EXPECT_EQ(verify_steps(listed), looked_complete ? 2u : 1u);
  EXPECT_EQ(listed.newest_complete, 0u);
  EXPECT_FALSE(listed.entries[1].complete);
  EXPECT_THAT(listed.entries[1].problem, HasSubstr("CRC-32"));
  EXPECT_FALSE(listed.entries[2].complete);
}

TEST_F(RunTest, ADirectoryIsARunOnlyIfItHasNoCheckpointOfItsOwn) {
  EXPECT_FALSE(is_run_directory(run()));
  add_text("notes.txt", "");
  EXPECT_FALSE(is_run_directory(run()));
  add_dcp("step-1");
  EXPECT_TRUE(is_run_directory(run()));
  EXPECT_FALSE(is_run_directory(run() / "step-1"));
  EXPECT_FALSE(is_run_directory(run() / "notes.txt"));
  EXPECT_FALSE(is_run_directory(run() / "nothing"));
  EXPECT_ERROR(Checkpoint::open(run()), ErrorCode::not_found, "no checkpoint in this directory", "it has 'step-1'");
  fs::copy(runs::golden_safetensors_file(), run() / "model.safetensors");
  EXPECT_FALSE(is_run_directory(run()));
}

TEST_F(RunTest, WhatIsNoDirectoryIsRefused) {
  add_text("a", "");
  EXPECT_ERROR(list_run(run() / "nothing"), ErrorCode::not_found, "no such file or directory");
  EXPECT_ERROR(list_run(run() / std::string(300, 'a')), ErrorCode::io, "File name too long");
  EXPECT_ERROR(list_run(""), ErrorCode::invalid_argument, "the path is empty, expected the path of a checkpoint");
  EXPECT_ERROR(list_run(run() / "a"), ErrorCode::not_found, "found a file, expected the directory of a run");
  Cancellation cancellation;
  cancellation.request();
  add_dcp("step-1");
  EXPECT_ERROR(list_run(run(), &cancellation), ErrorCode::cancelled, "interrupted");
}

}  // namespace
}  // namespace tessera::checkpoint
