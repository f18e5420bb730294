#include "tessera/layout/shard_metadata.h"

#include <gtest/gtest.h>

#include "layout/sharding_golden.h"
#include "support/error_matchers.h"

namespace tessera {
namespace {

template <typename F>
bool accepts(F&& f) {
  try {
    f();
    return true;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument) << error.what();
    return false;
  }
}

TEST(ShardMetadataTest, OverlapIsWhatPyTorchSaysItIs) {
  for (const nlohmann::json& example : testing::sharding_cases("shards")) {
    const std::vector<ShardMetadata> shards = testing::shards_of(example[1]);
    // PyTorch 2.14 accepts these, unlike the version that wrote the examples.
    const auto is_empty_at_0 = [](const ShardMetadata& shard) {
      return shard == ShardMetadata(std::vector<std::int64_t>(shard.rank(), 0), shard.shard_sizes) &&
             is_empty(shard.box());
    };
    const bool are_one_box =
        std::all_of(shards.begin(), shards.end(), [&](const ShardMetadata& one) { return one == shards[0]; });
    const bool accepted_now = !shards.empty() && are_one_box && is_empty_at_0(shards[0]);
    EXPECT_EQ(accepts([&] { validate_non_overlapping(shards); }), accepted_now || !example[2].get<bool>()) << example;
  }
}

TEST(ShardMetadataTest, ATensorIsWhatPyTorchSaysItIs) {
  for (const nlohmann::json& example : testing::sharding_cases("shards")) {
    const std::vector<ShardMetadata> shards = testing::shards_of(example[1]);
    const auto size = example[0].get<std::vector<std::int64_t>>();
    EXPECT_EQ(accepts([&] { check_tensor(shards, size); }), example[3].get<bool>()) << example;
  }
}

TEST(ShardMetadataTest, ErrorsNameTheShards) {
  const RemoteDevice device("rank:1/cpu");
  const std::vector<ShardMetadata> overlapping = {
      {{0, 0}, {2, 4}, device}, {{5, 0}, {1, 4}, device}, {{1, 0}, {3, 4}, device}};
  EXPECT_ERROR(validate_non_overlapping(overlapping), ErrorCode::invalid_argument,
               "shards [0, 2)x[0, 4) on rank:1/cpu and [1, 4)x[0, 4) on rank:1/cpu overlap");
  const std::vector<ShardMetadata> of_two_ranks = {{{0, 0}, {2, 4}}, {{2}, {1}}};
  EXPECT_ERROR(validate_non_overlapping(of_two_ranks), ErrorCode::invalid_argument, "[0, 2)x[0, 4)", "[2, 3)",
               "the same number of dimensions");
}

TEST(ShardMetadataTest, ErrorsNameWhatIsMissing) {
  const std::vector<ShardMetadata> shards = {{{0, 0}, {2, 4}}, {{2, 2}, {2, 2}}};
  const auto check = [&](std::vector<std::int64_t> size) { check_tensor(shards, size); };
  EXPECT_ERROR(check({4, 4}), ErrorCode::invalid_argument, "size [4, 4]", "12 elements, expected 16",
               "no shard has [2, 4)x[0, 2)");
  EXPECT_ERROR(check({3, 4}), ErrorCode::invalid_argument, "shard [2, 4)x[2, 4)", "ends at 4 in dimension 0",
               "at most 3");
  EXPECT_ERROR(check({4}), ErrorCode::invalid_argument, "size [4]", "dimensions, expected 1");
  EXPECT_ERROR(check_tensor({}, std::vector<std::int64_t>{4}), ErrorCode::invalid_argument, "at least one shard");
}

TEST(ShardMetadataTest, OffsetsAndSizesMustMatch) {
  EXPECT_ERROR(ShardMetadata({0, 1}, {2}), ErrorCode::invalid_argument, "offsets [0, 1] and sizes [2]",
               "as many offsets as sizes");
  EXPECT_ERROR(ShardMetadata({-1}, {2}), ErrorCode::invalid_argument, "offsets [-1] and sizes [2]",
               "no negative value");
  EXPECT_ERROR(ShardMetadata({1}, {-2}), ErrorCode::invalid_argument, "sizes [-2]", "no negative value");
}

TEST(ShardMetadataTest, EndsThatOverflowAreRefused) {
  constexpr std::int64_t kMax = INT64_MAX;
  const std::vector<ShardMetadata> in_one = {{{0}, {2}}, {{kMax}, {1}}};
  const std::vector<ShardMetadata> in_two = {{{0, 0}, {2, 2}}, {{kMax, 1}, {1, 1}}};
  EXPECT_ERROR(validate_non_overlapping(in_one), ErrorCode::corrupt, "end of a shard overflows");
  EXPECT_ERROR(validate_non_overlapping(in_two), ErrorCode::corrupt, "end of a shard overflows");
}

// An empty shard overlaps a shard that extends past it on both sides, and only touches one that begins or ends at it.
TEST(ShardMetadataTest, EmptyShards) {
  const auto overlap = [](const std::vector<ShardMetadata>& shards) {
    return !accepts([&] { validate_non_overlapping(shards); });
  };
  EXPECT_TRUE(overlap({{{0}, {4}}, {{2}, {0}}}));
  EXPECT_FALSE(overlap({{{0}, {4}}, {{4}, {0}}}));
  EXPECT_FALSE(overlap({{{0}, {4}}, {{0}, {0}}}));
  EXPECT_TRUE(overlap({{{3}, {0}}, {{3}, {0}}}));
  EXPECT_FALSE(overlap({{{0}, {0}}, {{0}, {0}}}));
  EXPECT_FALSE(overlap({{{0, 0}, {0, 4}}, {{0, 0}, {0, 4}}, {{0, 0}, {0, 4}}}));
  EXPECT_TRUE(overlap({{{0, 1}, {0, 4}}, {{0, 1}, {0, 4}}}));
  EXPECT_TRUE(overlap({{{0, 0}, {4, 4}}, {{2, 1}, {0, 2}}}));
  EXPECT_FALSE(overlap({{{0, 0}, {4, 4}}, {{2, 4}, {0, 2}}}));
  EXPECT_TRUE(overlap({{{0, 2}, {4, 0}}, {{2, 0}, {0, 4}}}));
}

TEST(ShardMetadataTest, PrintsAsLines) {
  ShardedTensorMetadata metadata;
  metadata.size = {4, 2};
  metadata.tensor_properties.requires_grad = true;
  metadata.tensor_properties.memory_format = MemoryFormat::preserve;
  metadata.tensor_properties.pin_memory = true;
  metadata.shards_metadata = {{{0, 0}, {2, 2}, RemoteDevice("rank:0/cpu")}, {{2, 0}, {2, 2}}};
  EXPECT_EQ(to_string(metadata),
            "[4, 2] of float32, torch.strided, requires_grad, torch.preserve_format, pin_memory\n"
            "  [0, 2)x[0, 2) on rank:0/cpu\n"
            "  [2, 4)x[0, 2)");
}

TEST(ShardMetadataTest, WhatRanksCompareHasNoIndicesOfDevices) {
  ShardedTensorMetadata metadata;
  metadata.size = {4};
  metadata.shards_metadata = {
      {{0}, {2}, RemoteDevice("rank:0/cuda:1")}, {{2}, {1}, RemoteDevice("cuda:1")}, {{3}, {1}}};
  ShardedTensorMetadata on_another = metadata;
  on_another.shards_metadata[0].placement = RemoteDevice("rank:0/cuda:0");
  EXPECT_EQ(comparable_text(metadata), comparable_text(on_another));
  EXPECT_EQ(comparable_text(metadata),
            "[4] of float32, torch.strided\n"
            "  [0, 2) on rank:0/cuda\n"
            "  [2, 3) on cuda\n"
            "  [3, 4)");
}

}  // namespace
}  // namespace tessera
