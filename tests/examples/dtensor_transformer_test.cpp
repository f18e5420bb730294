// Runs examples/dtensor_transformer.cpp with commands such as those in its first lines.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "cli/command.h"
#include "support/paths.h"
#include "support/temporary_directory.h"

namespace tessera::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

Outcome run_transformer(int ranks, const std::string& directory, int steps, int tp) {
  return run_tessera({"run", "-n", std::to_string(ranks), "--no-prefix", "--", programs_dir() + "/dtensor_transformer",
                      directory, std::to_string(steps), std::to_string(tp)});
}

TEST(DTensorTransformerExampleTest, ItTrainsAsInOneProcessOnAnyMesh) {
  const TemporaryDirectory directory;
  const std::string alone = (directory / "alone").string(), on_meshes = (directory / "meshes").string();
  const Outcome expected = run_transformer(1, alone, 14, 1);
  EXPECT_EQ(expected.status, 0) << expected.err;
  const Outcome first = run_transformer(4, on_meshes, 5, 2);
  EXPECT_EQ(first.status, 0) << first.err;
  EXPECT_THAT(expected.out, StartsWith(first.out));  // the same losses
  const Outcome second = run_transformer(3, on_meshes, 10, 3);
  EXPECT_EQ(second.status, 0) << second.err;
  EXPECT_THAT(second.out, StartsWith("resumed from step 5 on DeviceMesh(dp=1, tp=3)\nstep 6 loss "));
  EXPECT_THAT(expected.out, HasSubstr(second.out.substr(second.out.find("step 6"))));
  const Outcome third = run_transformer(2, on_meshes, 14, 1);
  EXPECT_EQ(third.status, 0) << third.err;
  EXPECT_THAT(expected.out, HasSubstr(third.out.substr(third.out.find("step 11"))));
  EXPECT_EQ(run_tessera({"verify", on_meshes + "/step-10"}).status, 0);
}

TEST(DTensorTransformerExampleTest, RanksThatMakeNoMeshAreRefused) {
  const TemporaryDirectory directory;
  const Outcome outcome = run_transformer(3, directory.path().string(), 1, 2);
  EXPECT_EQ(outcome.status, 3) << outcome.err;
  EXPECT_THAT(outcome.err, HasSubstr("dtensor_transformer: "));
}

}  // namespace
}  // namespace tessera::testing
