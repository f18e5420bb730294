// Runs examples/two_dimensions.cpp with commands such as those in its first lines.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "cli/command.h"
#include "support/paths.h"
#include "support/temporary_directory.h"

namespace tessera::testing {
namespace {

using ::testing::EndsWith;
using ::testing::HasSubstr;

Outcome run_two_dimensions(int ranks, const std::string& directory, int steps, int tp) {
  return run_tessera({"run", "-n", std::to_string(ranks), "--no-prefix", "--",
                      tessera::testing::programs_dir() + "/two_dimensions", directory, std::to_string(steps),
                      std::to_string(tp)});
}

TEST(TwoDimensionsExampleTest, ItGoesOnOnAnotherMesh) {
  const TemporaryDirectory directory;
  const std::string alone = (directory / "alone").string(), parts = (directory / "parts").string();
  const Outcome expected = run_two_dimensions(1, alone, 40, 1);
  EXPECT_EQ(expected.status, 0) << expected.err;
  const Outcome first = run_two_dimensions(4, parts, 20, 2);
  EXPECT_EQ(first.status, 0) << first.err;
  EXPECT_THAT(expected.out, HasSubstr(first.out));
  const Outcome second = run_two_dimensions(3, parts, 30, 3);
  EXPECT_EQ(second.status, 0) << second.err;
  const Outcome rest = run_two_dimensions(2, parts, 40, 1);
  EXPECT_EQ(rest.status, 0) << rest.err;
  EXPECT_THAT(rest.out, HasSubstr("resumed from step 30 on DeviceMesh(dp=2, tp=1)\nstep 40 loss "));
  // Equal up to the order of summation over the ranks.
  EXPECT_THAT(expected.out, HasSubstr(second.out.substr(second.out.find("step 30 loss"))));
  EXPECT_THAT(expected.out, EndsWith(rest.out.substr(rest.out.find("step 40"))));
  EXPECT_EQ(run_tessera({"verify", parts + "/step-40"}).status, 0);
}

TEST(TwoDimensionsExampleTest, RanksThatMakeNoMeshAreRefused) {
  const TemporaryDirectory directory;
  const Outcome outcome = run_two_dimensions(3, directory.path().string(), 1, 2);
  EXPECT_EQ(outcome.status, 3) << outcome.err;
  EXPECT_THAT(outcome.err, HasSubstr("two_dimensions: "));
}

}  // namespace
}  // namespace tessera::testing
