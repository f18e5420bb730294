// Runs examples/train_large.cpp with commands such as those in its first lines.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "cli/command.h"
#include "support/paths.h"
#include "support/temporary_directory.h"

namespace tessera::testing {
namespace {

using ::testing::HasSubstr;

Outcome run_train_large(int ranks, const std::string& checkpoint, int steps) {
  return run_tessera({"run", "-n", std::to_string(ranks), "--no-prefix", "--", programs_dir() + "/train_large",
                      checkpoint, std::to_string(steps), "160"});
}

TEST(TrainLargeExampleTest, ItTrainsSavesAndResumesWhatNoRankCanHold) {
  const TemporaryDirectory directory;
  const std::string checkpoint = (directory / "checkpoint").string();
  const Outcome first = run_train_large(4, checkpoint, 2);
  EXPECT_EQ(first.status, 0) << first.err;
  EXPECT_THAT(first.out, HasSubstr("4 ranks, parameters of 180 MiB, 160 MiB for each rank, from step 0\nstep 1 loss "));
  const Outcome second = run_train_large(6, checkpoint, 3);
  EXPECT_EQ(second.status, 0) << second.err;
  EXPECT_THAT(second.out, HasSubstr("from step 2\nstep 3 loss "));
  const Outcome alone = run_train_large(1, checkpoint, 4);
  EXPECT_NE(alone.status, 0);
  EXPECT_THAT(alone.err, HasSubstr("train_large: allocate a tensor: the system refused "));
  EXPECT_EQ(run_tessera({"verify", checkpoint}).status, 0);
}

}  // namespace
}  // namespace tessera::testing
