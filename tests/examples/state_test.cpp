// Runs examples/save_load.cpp and examples/train.cpp with the commands in their first lines.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "cli/command.h"
#include "support/paths.h"
#include "support/temporary_directory.h"

namespace tessera::testing {
namespace {

using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;

Outcome run_on(int ranks, std::vector<std::string> command) {
  std::vector<std::string> words = {"run", "-n", std::to_string(ranks), "--no-prefix", "--"};
  words.insert(words.end(), command.begin(), command.end());
  return run_tessera(words);
}

TEST(StateExampleTest, SavedByFourRanksAndLoadedByTwo) {
  const TemporaryDirectory directory;
  const std::string path = (directory / "checkpoint").string();
  const Outcome first = run_on(4, {tessera::testing::programs_dir() + "/save_load", path});
  EXPECT_EQ(first.status, 0) << first.err;
  EXPECT_THAT(first.out, HasSubstr("4 ranks saved\n4 ranks loaded step 100: rank 0 has [8, 1] of 0.5, "));
  const Outcome second = run_on(2, {tessera::testing::programs_dir() + "/save_load", path});
  EXPECT_EQ(second.status, 0) << second.err;
  EXPECT_THAT(second.out, HasSubstr("2 ranks loaded step 100: rank 0 has [8, 2] of 0.5, "));
  EXPECT_EQ(run_tessera({"verify", path}).status, 0);
}

TEST(StateExampleTest, TrainingGoesOnWhereItWasOnAnotherNumberOfRanks) {
  const TemporaryDirectory directory;
  const std::string alone = (directory / "alone").string(), parts = (directory / "parts").string();
  const Outcome expected = run_on(1, {tessera::testing::programs_dir() + "/train", alone, "40"});
  EXPECT_EQ(expected.status, 0) << expected.err;
  EXPECT_EQ(run_on(2, {tessera::testing::programs_dir() + "/train", parts, "25"}).status, 0);  // saved at 10 and 20
  const Outcome rest = run_on(3, {tessera::testing::programs_dir() + "/train", parts, "40"});
  EXPECT_EQ(rest.status, 0) << rest.err;
  EXPECT_THAT(rest.out, HasSubstr("resumed from step 20\nstep 30 loss "));
  EXPECT_THAT(rest.out, Not(HasSubstr("step 20 loss")));
  // Equal up to the order of summation over the ranks.
  EXPECT_THAT(expected.out, EndsWith(rest.out.substr(rest.out.find("step 30"))));
  EXPECT_EQ(run_tessera({"verify", parts + "/step-40"}).status, 0);
}

}  // namespace
}  // namespace tessera::testing
