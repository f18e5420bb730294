// The backends that a LibTorch has, and the errors if one is missing or has no hardware.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/cuda.h>

#include <algorithm>

#include "support/error_matchers.h"
#include "support/rank_processes.h"
#include "tessera/comm/init.h"

namespace tessera {
namespace {

using ::testing::AnyOf;
using ::testing::Contains;
using ::testing::Each;
using ::testing::HasSubstr;
using testing::quick;
using testing::RankOutcome;
using testing::run_processes;
using ::testing::StartsWith;

bool has_backend(const std::string& name) {
  const std::vector<std::string> names = available_backends();
  return std::find(names.begin(), names.end(), name) != names.end();
}

InitOptions on_nccl() {
  InitOptions options = quick();
  options.backend = "nccl";
  return options;
}

TEST(BackendTest, EveryLibTorchHasGloo) { EXPECT_TRUE(has_backend("gloo")); }

TEST(BackendTest, ALibTorchWithoutNcclListsWhatItHas) {
  if (has_backend("nccl")) GTEST_SKIP() << "this LibTorch has NCCL";
  InitOptions options = on_nccl();
  options.world_size = 2;
  options.master_port = free_port();
  EXPECT_ERROR(init_process_group(options), ErrorCode::unsupported, "no backend 'nccl'", "expected one of: gloo");
}

// If one rank ends before another has looked for a GPU, the other reports that instead.
TEST(BackendTest, NcclWithoutAGpuIsAnErrorOnEveryRank) {
  if (!has_backend("nccl")) GTEST_SKIP() << "this LibTorch lacks NCCL";
  if (torch::cuda::device_count() > 0) GTEST_SKIP() << "this machine has a GPU";
  std::vector<std::string> reports;
  for (const RankOutcome& outcome : run_processes(2, on_nccl(), [](const ProcessGroup&) { return "a group"; }))
    reports.push_back(outcome.report);
  EXPECT_THAT(reports, Contains(HasSubstr("of 2 found no GPU for the backend 'nccl'")));
  EXPECT_THAT(reports, Each(AnyOf(StartsWith("unsupported: init process group: rank "), StartsWith("rank_failure: "))));
}

}  // namespace
}  // namespace tessera
