// The commands on the directory of a run: inspect (ls) and prune.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "cli/command.h"
#include "support/temporary_directory.h"

namespace tessera::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::ContainsRegex;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

class RunsTest : public ::testing::Test {
 protected:
  RunsTest() {
    for (const char* name : {"step-1", "step-2", "step-10"}) {
      fs::copy(demo(), run_ / name, fs::copy_options::recursive);
    }
    fs::remove(run_ / "step-2/.metadata");
  }
  std::string path() const { return run_.path(); }
  std::string path_of(const std::string& name) const { return run_ / name; }

 private:
  const TemporaryDirectory run_;
};

TEST_F(RunsTest, InspectAndLsListTheSteps) {
  const Outcome outcome = run_tessera({"inspect", path()});
  EXPECT_EQ(outcome.status, 0);
  EXPECT_EQ(outcome.err, "");
  EXPECT_THAT(outcome.out, ContainsRegex("step-1  +complete  +[0-9.]+ KiB  +4  [0-9-]+T[0-9:]+\n"));
  EXPECT_THAT(outcome.out, ContainsRegex("step-2  +incomplete "));
  EXPECT_THAT(outcome.out, ContainsRegex("step-10  +complete, newest "));
  EXPECT_THAT(outcome.out, HasSubstr("note: step-2: found data files but no .metadata"));
  EXPECT_THAT(outcome.out, HasSubstr(": 2 of 3 steps complete, "));
  EXPECT_EQ(run_tessera({"ls", path()}).out, outcome.out);
  EXPECT_THAT(run_tessera({"verify", path()}).err, HasSubstr("it has 'step-10' and 2 more steps"));
}

TEST_F(RunsTest, TheListAsJson) {
  const auto report = nlohmann::json::parse(run_tessera({"ls", path(), "--json"}).out);
  EXPECT_EQ(report["newest"], "step-10");
  ASSERT_EQ(report["steps"].size(), 3u);
  EXPECT_EQ(report["steps"][0]["name"], "step-1");
  EXPECT_EQ(report["steps"][0]["format"], "dcp");
  EXPECT_EQ(report["steps"][0]["ranks"], 4);
  EXPECT_EQ(report["steps"][1]["complete"], false);
  EXPECT_THAT(report["steps"][1]["problem"], HasSubstr("no .metadata"));
  EXPECT_EQ(report["steps"][2]["step"], 10);
  EXPECT_EQ(report["steps"][2]["newest"], true);
}

TEST_F(RunsTest, VerifyIsNoIfACompleteStepIsDamaged) {
  EXPECT_EQ(run_tessera({"ls", path(), "--verify"}).status, 0);
  put_byte(path_of("step-10/__0_0.distcp"), 5000, 0x55);
  EXPECT_EQ(run_tessera({"ls", path()}).status, 0);
  const Outcome outcome = run_tessera({"ls", path(), "--verify"});
  EXPECT_EQ(outcome.status, 1);
  EXPECT_THAT(outcome.out, ContainsRegex("step-1  +complete, newest"));
  EXPECT_THAT(outcome.out, ContainsRegex("note: step-10: __0_0.distcp"));
}

TEST_F(RunsTest, ACheckpointNextToStepsIsShownWithANote) {
  EXPECT_EQ(run_tessera({"convert", path_of("step-1"), path_of("model.safetensors"), "--select", "model.*"}).status, 0);
  const Outcome outcome = run_tessera({"inspect", path()});
  EXPECT_THAT(outcome.out, HasSubstr("safetensors: "));
  EXPECT_THAT(outcome.out, HasSubstr("note: 3 steps in this directory; --steps lists them"));
  EXPECT_THAT(run_tessera({"inspect", path(), "--steps"}).out, HasSubstr("2 of 3 steps complete"));
  EXPECT_EQ(run_tessera({"inspect", path(), "--verify"}).status, 2);
  EXPECT_EQ(run_tessera({"inspect", path(), "x", "--steps"}).status, 2);
}

TEST_F(RunsTest, NarrowTerminalsNameTheColumnsThatDoNotFit) {
  Conditions narrow;
  narrow.terminal_columns = 40;
  const Outcome outcome = run_tessera({"ls", path()}, narrow);
  EXPECT_THAT(outcome.out, HasSubstr("complete, newest"));
  EXPECT_THAT(outcome.out, HasSubstr("not shown: "));
  EXPECT_THAT(outcome.out, HasSubstr("WRITTEN"));
  EXPECT_THAT(run_tessera({"ls", path()}).out, Not(HasSubstr("not shown: ")));
}

TEST_F(RunsTest, PruneRemovesOldSteps) {
  const Outcome planned = run_tessera({"prune", path(), "--keep", "1", "--dry-run"});
  EXPECT_EQ(planned.status, 0);
  EXPECT_THAT(planned.out, ContainsRegex("would remove step-1: old, [0-9.]+ KiB\n"));
  EXPECT_THAT(planned.out, ContainsRegex("would remove 1 of 3 steps, [0-9.]+ KiB\n"));
  EXPECT_THAT(names_in(path()), ElementsAre("step-1", "step-10", "step-2"));
  const Outcome outcome = run_tessera({"prune", path(), "--keep", "1"});
  EXPECT_EQ(outcome.status, 0);
  EXPECT_THAT(outcome.out, HasSubstr("kept step-2: found data files but no .metadata"));
  EXPECT_THAT(names_in(path()), ElementsAre("step-10", "step-2"));
  const auto report =
      nlohmann::json::parse(run_tessera({"prune", path(), "--keep", "1", "--incomplete", "--json"}).out);
  EXPECT_EQ(report["removed"][0]["name"], "step-2");
  EXPECT_EQ(report["removed"][0]["why"], "incomplete");
  EXPECT_GT(report["freed_bytes"], 0);
  EXPECT_THAT(names_in(path()), ElementsAre("step-10"));
}

// docs/json/README.md: the one report that is complete with this status.
TEST_F(RunsTest, AReportOfPruneIsCompleteIfAStepCannotBeRemoved) {
  Conditions conditions;
  conditions.without_root_rights = true;
  fs::permissions(path(), fs::perms::owner_read | fs::perms::owner_exec);
  const Outcome outcome = run_tessera({"prune", path(), "--keep", "1", "--json"}, conditions);
  fs::permissions(path(), fs::perms::owner_all);
  EXPECT_EQ(outcome.status, 3);
  EXPECT_TRUE(is_one_error_line(outcome.err)) << outcome.err;
  const auto report = nlohmann::json::parse(outcome.out);
  ASSERT_EQ(report["failed"].size(), 1u);
  EXPECT_THAT(report["failed"][0], ContainsRegex("^rename .*/step-1 to .*: Permission denied$"));
  EXPECT_TRUE(report["removed"].empty());
  EXPECT_EQ(report["kept"].size(), 2u);
  EXPECT_THAT(names_in(path()), ElementsAre("step-1", "step-10", "step-2"));
}

TEST_F(RunsTest, PruneWithoutKeepIsWrongUsage) {
  EXPECT_THAT(run_tessera({"prune", path()}).err, HasSubstr("--keep is required"));
  EXPECT_EQ(run_tessera({"prune", path(), "--keep", "0"}).status, 2);
  EXPECT_EQ(run_tessera({"prune", path(), "--keep", "1", "--every", "0"}).status, 2);
  const Outcome outcome = run_tessera({"prune", path_of("nothing"), "--keep", "1"});
  EXPECT_EQ(outcome.status, 3);
  EXPECT_TRUE(is_one_error_line(outcome.err)) << outcome.err;
}

}  // namespace
}  // namespace tessera::testing
