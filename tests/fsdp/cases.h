#pragma once
// The test cases for flat parameters and training: numbers of ranks, values of use_orig_params, strategies.

#include <gtest/gtest.h>

#include <string>
#include <tuple>

#include "tessera/fsdp/options.h"

namespace tessera::fsdp {

using Case = std::tuple<int, bool, ShardingStrategy>;  // ranks, use_orig_params

inline auto every_case() {
  return ::testing::Combine(
      ::testing::Range(1, 5), ::testing::Bool(),
      ::testing::Values(ShardingStrategy::full_shard, ShardingStrategy::shard_grad_op, ShardingStrategy::no_shard));
}

inline std::string name_of_case(const ::testing::TestParamInfo<Case>& test) {
  const auto [ranks, use_orig_params, strategy] = test.param;
  const char* const strategies[] = {"FullShard", "ShardGradOp", "NoShard"};
  return std::to_string(ranks) + (use_orig_params ? "OrigParams" : "FlatParam") +
         strategies[static_cast<std::size_t>(strategy)];
}

}  // namespace tessera::fsdp
