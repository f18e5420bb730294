#include "tessera/layout/sharding_spec.h"

#include <gtest/gtest.h>

#include "layout/sharding_golden.h"
#include "support/error_matchers.h"

namespace tessera {
namespace {

using nlohmann::json;
using Sizes = std::vector<std::int64_t>;

std::vector<RemoteDevice> ranks(std::size_t count) {
  std::vector<RemoteDevice> devices;
  for (std::size_t i = 0; i < count; ++i) devices.emplace_back(static_cast<std::int64_t>(i), Device{});
  return devices;
}

TEST(ChunkShardingSpecTest, CutsAsPyTorchCuts) {
  for (const json& example : testing::sharding_cases("chunk_specs")) {
    const ChunkShardingSpec spec(example[0], ranks(example[1]));
    const Sizes size = example[2];
    if (example[3].is_null()) {
      EXPECT_ERROR(spec.build_metadata(size, {}), ErrorCode::invalid_argument,
                   "ChunkShardingSpec of dimension " + example[0].dump(), shape_to_string(size));
      continue;
    }
    const ShardedTensorMetadata metadata = spec.build_metadata(size, {});
    std::vector<ShardMetadata> expected = testing::shards_of(example[3]);
    for (std::size_t i = 0; i < expected.size(); ++i) expected[i].placement = spec.placements()[i];
    EXPECT_EQ(metadata.shards_metadata, expected) << example;
    EXPECT_EQ(metadata.size, size);
  }
}

TEST(ChunkShardingSpecTest, KeepsPropertiesAndThePlacementsOrder) {
  const ChunkShardingSpec spec(0, {RemoteDevice("rank:1/cuda:1"), RemoteDevice("rank:0/cpu")});
  TensorProperties properties;
  properties.dtype = DType::bfloat16;
  const ShardedTensorMetadata metadata = spec.build_metadata(Sizes{3, 2}, properties);
  EXPECT_EQ(metadata.tensor_properties, properties);
  EXPECT_EQ(to_string(metadata),
            "[3, 2] of bfloat16, torch.strided\n"
            "  [0, 2)x[0, 2) on rank:1/cuda:1\n"
            "  [2, 3)x[0, 2) on rank:0/cpu");
}

TEST(ChunkShardingSpecTest, NeedsAPlacement) {
  EXPECT_ERROR(ChunkShardingSpec(0, {}), ErrorCode::invalid_argument, "at least one placement");
}

TEST(ChunkShardingSpecTest, ComparesAndPrints) {
  const ChunkShardingSpec spec(0, ranks(2));
  EXPECT_EQ(spec.to_string(), "ChunkShardingSpec(dim=0, placements=[rank:0/cpu, rank:1/cpu])");
  EXPECT_TRUE(spec == ChunkShardingSpec(0, ranks(2)));
  EXPECT_FALSE(spec == ChunkShardingSpec(1, ranks(2)));
  EXPECT_FALSE(spec == ChunkShardingSpec(0, ranks(3)));
  EXPECT_FALSE(spec == EnumerableShardingSpec({{{0}, {1}}}));
  EXPECT_FALSE(EnumerableShardingSpec({{{0}, {1}}}) == spec);
}

TEST(EnumerableShardingSpecTest, TakesShardsThatPartitionTheTensor) {
  const std::vector<ShardMetadata> shards = {{{0, 0}, {2, 2}}, {{0, 2}, {2, 1}}};
  const EnumerableShardingSpec spec(shards);
  EXPECT_EQ(spec.build_metadata(Sizes{2, 3}, {}).shards_metadata, shards);
  EXPECT_ERROR(spec.build_metadata(Sizes{2, 4}, {}), ErrorCode::invalid_argument, "no shard has [0, 2)x[3, 4)");
  EXPECT_TRUE(spec == EnumerableShardingSpec(shards));
  EXPECT_EQ(spec.to_string(), "EnumerableShardingSpec(shards=[[0, 2)x[0, 2), [0, 2)x[2, 3)])");
}

TEST(EnumerableShardingSpecTest, RefusesWhatPyTorchRefuses) {
  EXPECT_ERROR(EnumerableShardingSpec({}), ErrorCode::invalid_argument, "at least one shard");
  EXPECT_ERROR(EnumerableShardingSpec({{{0}, {2}}, {{0, 0}, {1, 1}}}), ErrorCode::invalid_argument,
               "the same number of dimensions");
  EXPECT_ERROR(EnumerableShardingSpec({{{0}, {2}}, {{1}, {2}}}), ErrorCode::invalid_argument, "overlap");
}

TEST(InferShardingSpecTest, InfersWhatPyTorchInfers) {
  std::size_t chunked = 0;
  for (const json& example : testing::sharding_cases("inferred")) {
    const std::vector<ShardMetadata> shards = testing::shards_of(example[0]);
    const std::shared_ptr<const ShardingSpec> spec = infer_sharding_spec(shards);
    if (example[1].is_null()) {
      EXPECT_TRUE(*spec == EnumerableShardingSpec(shards)) << spec->to_string() << "\n" << example;
      continue;
    }
    std::vector<RemoteDevice> placements;
    for (const json& placement : example[1][1]) placements.emplace_back(placement.get<std::string>());
    EXPECT_TRUE(*spec == ChunkShardingSpec(example[1][0], placements)) << spec->to_string() << "\n" << example;
    ++chunked;
  }
  EXPECT_GT(chunked, 50u);
}

TEST(InferShardingSpecTest, AChunkNeedsAPlacement) {
  const std::vector<ShardMetadata> shards = {{{0}, {2}}, {{2}, {2}}};
  EXPECT_ERROR(infer_sharding_spec(shards), ErrorCode::invalid_argument, "[0, 2) has no placement");
  EXPECT_ERROR(infer_sharding_spec({}), ErrorCode::invalid_argument, "at least one shard");
}

// A custom spec: one row for each rank in turn.
class RowByRow final : public ShardingSpec {
 public:
  std::string_view kind() const override { return "RowByRow"; }
  ShardedTensorMetadata build_metadata(std::span<const std::int64_t> size,
                                       const TensorProperties& properties) const override {
    ShardedTensorMetadata metadata{{}, {size.begin(), size.end()}, properties};
    for (std::int64_t row = 0; row < size[0]; ++row) {
      metadata.shards_metadata.push_back({{row, 0}, {1, size[1]}, RemoteDevice(row % 2, Device{})});
    }
    return metadata;
  }
  bool equals(const ShardingSpec& other) const override { return other.kind() == kind(); }
  std::string to_string() const override { return "RowByRow()"; }
};

TEST(ShardingSpecTest, WhatRanksCompareHasNoIndicesOfDevices) {
  const auto chunks = [](const char* first, const char* second) {
    return ChunkShardingSpec(1, {RemoteDevice(first), RemoteDevice(second)});
  };
  EXPECT_EQ(comparable_text(chunks("rank:0/cuda:0", "rank:1/cuda:1")),
            "ChunkShardingSpec(dim=1, placements=[rank:0/cuda, rank:1/cuda])");
  EXPECT_EQ(comparable_text(chunks("rank:0/cuda:1", "worker/cpu")), chunks("rank:0/cuda", "worker/cpu").to_string());
  const EnumerableShardingSpec spec({{{0}, {2}, RemoteDevice("rank:1/cuda:3")}, {{2}, {1}}});
  EXPECT_EQ(comparable_text(spec), "EnumerableShardingSpec(shards=[[0, 2) on rank:1/cuda, [2, 3)])");
  EXPECT_EQ(comparable_text(RowByRow()), "RowByRow()");
}

TEST(ShardingSpecTest, ASpecOfAUsersOwn) {
  const std::unique_ptr<const ShardingSpec> spec = std::make_unique<RowByRow>();
  const ShardedTensorMetadata metadata = spec->build_metadata(Sizes{4, 2}, {});
  validate_non_overlapping(metadata.shards_metadata);
  check_tensor(metadata.shards_metadata, metadata.size);
  EXPECT_FALSE(*spec == ChunkShardingSpec(0, ranks(2)));
}

}  // namespace
}  // namespace tessera
