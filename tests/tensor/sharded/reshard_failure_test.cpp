// A rank that dies while a tensor is resharded.

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "support/rank_processes.h"
#include "tensor/sharded/reshard.h"
#include "tensor/sharding_support.h"

namespace tessera {
namespace {

using std::chrono::milliseconds;
using testing::chunk_spec;
using testing::RankOutcome;

class DyingRankTest : public ::testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Ways, DyingRankTest, ::testing::Bool(),
                         [](const auto& test) { return test.param ? "InSharedMemory" : "Packed"; });

TEST_P(DyingRankTest, IsNamedToEveryOtherAndTheTensorStaysAsItWas) {
  const auto begin = std::chrono::steady_clock::now();
  const std::vector<RankOutcome> outcomes = testing::run_processes(3, testing::quick(), [&](const ProcessGroup& group) {
    const std::vector<int> ranks = testing::ranks_of(3);
    const ShardedTensor tensor = ShardedTensor::full(chunk_spec(0, ranks), {3000, 3000}, group.rank(), group);
    const ShardedTensorMetadata target =
        chunk_spec(1, ranks)->build_metadata(tensor.size(), tensor.metadata().tensor_properties);
    ExchangeOptions options;
    options.use_shared_memory = GetParam();
    options.round_bytes = std::int64_t{256} << 10;
    reshard(tensor, target, options);
    if (group.rank() == 1) {
      std::thread([] {
        std::this_thread::sleep_for(milliseconds(300));
        ::kill(::getpid(), SIGKILL);
      }).detach();
    }
    std::string error_text;
    try {
      for (;;) reshard(tensor, target, options);
    } catch (const Error& error) {
      error_text = std::string(error_code_name(error.code())) + ": " + error.what();
    }
    const bool is_as_it_was =
        at::equal(tensor.local_tensor(), at::full({1000, 3000}, static_cast<float>(group.rank())));
    return error_text + (is_as_it_was ? "" : " (and the tensor changed)");
  });
  EXPECT_EQ(outcomes[1].signal, SIGKILL);
  for (const std::size_t rank : {0u, 2u}) {
    EXPECT_THAT(outcomes[rank].report, ::testing::StartsWith("rank_failure: "));
    EXPECT_THAT(outcomes[rank].report, ::testing::EndsWith("rank 1 died: no sign of life for 1000 ms"));
  }
  EXPECT_LT(std::chrono::steady_clock::now() - begin, testing::kSoon);
}

}  // namespace
}  // namespace tessera
