// Runs examples/sharded_tensor.cpp with the commands in its first lines.

#include <gtest/gtest.h>

#include "cli/command.h"
#include "support/paths.h"

namespace tessera::testing {
namespace {

TEST(ExampleTest, ShardedTensor) {
  const Outcome outcome =
      run_tessera({"run", "-n", "2", "--no-prefix", "--", tessera::testing::programs_dir() + "/sharded_tensor"});
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_EQ(outcome.out,
            "ShardedTensor [4, 6] of float32, torch.strided\n"
            "  [0, 2)x[0, 6) on rank:0/cpu\n"
            "  [2, 4)x[0, 6) on rank:1/cpu\n"
            "ShardedTensor [4, 6] of float32, torch.strided\n"
            "  [0, 4)x[0, 3) on rank:0/cpu\n"
            "  [0, 4)x[3, 6) on rank:1/cpu\n"
            " 1  1  1  1  1  1\n"
            " 1  1  1  1  1  1\n"
            " 2  2  2  2  2  2\n"
            " 2  2  2  2  2  2\n"
            "[ CPUIntType{4,6} ]\n");
}

TEST(ExampleTest, ShardedTensorAlone) {
  const Outcome outcome = run_program({tessera::testing::programs_dir() + "/sharded_tensor"});
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_NE(outcome.out.find("[0, 4)x[0, 6) on rank:0/cpu"), std::string::npos) << outcome.out;
}

}  // namespace
}  // namespace tessera::testing
