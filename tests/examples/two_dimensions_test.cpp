// The example that trains on a mesh of two dimensions, as its first lines say that it is run.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "cli/command.h"
#include "support/temporary_directory.h"

namespace tessera::testing {
namespace {

using ::testing::EndsWith;
using ::testing::HasSubstr;

Outcome run_on(int ranks, const std::string& directory, int steps, int tp) {
  return run_tessera({"run", "-n", std::to_string(ranks), "--no-prefix", "--", TESSERA_PROGRAMS "/two_dimensions",
                      directory, std::to_string(steps), std::to_string(tp)});
}

TEST(TwoDimensionsExampleTest, ItGoesOnOnAnotherMesh) {
  const TemporaryDirectory directory;
  const std::string whole = (directory / "whole").string(), parts = (directory / "parts").string();
  const Outcome expected = run_on(1, whole, 40, 1);
  EXPECT_EQ(expected.status, 0) << expected.err;
  const Outcome first = run_on(4, parts, 20, 2);
  EXPECT_EQ(first.status, 0) << first.err;
  EXPECT_THAT(expected.out, HasSubstr(first.out));
  const Outcome second = run_on(3, parts, 30, 3);
  EXPECT_EQ(second.status, 0) << second.err;
  const Outcome rest = run_on(2, parts, 40, 1);
  EXPECT_EQ(rest.status, 0) << rest.err;
  EXPECT_THAT(rest.out, HasSubstr("goes on at step 30 on DeviceMesh(dp=2, tp=1)\nstep 40 loss "));
  // Up to the order in which ranks' parts are added up.
  EXPECT_THAT(expected.out, HasSubstr(second.out.substr(second.out.find("step 30 loss"))));
  EXPECT_THAT(expected.out, EndsWith(rest.out.substr(rest.out.find("step 40"))));
  EXPECT_EQ(run_tessera({"verify", parts + "/step-40"}).status, 0);
}

TEST(TwoDimensionsExampleTest, RanksThatMakeNoMeshAreRefused) {
  const TemporaryDirectory directory;
  const Outcome outcome = run_on(3, directory.path().string(), 1, 2);
  EXPECT_EQ(outcome.status, 3) << outcome.err;
  EXPECT_THAT(outcome.err, HasSubstr("two_dimensions: "));
}

}  // namespace
}  // namespace tessera::testing
