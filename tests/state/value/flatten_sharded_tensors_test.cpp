#include "tessera/state/flatten_sharded_tensors.h"
#include "tessera/state/load.h"
#include "tessera/state/save.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "support/error_matchers.h"
#include "tensor/sharding_support.h"
#include "tessera/comm/local_ranks.h"

namespace tessera {
namespace {

using testing::chunk_spec;
using testing::indices;
using testing::on_rank;
using testing::Sizes;

ShardedTensorMetadata metadata_of(std::vector<ShardMetadata> shards, Sizes size) {
  TensorProperties properties;
  properties.dtype = DType::int64;
  return {std::move(shards), std::move(size), properties};
}

// [8, 6] on four ranks: FSDP shards the rows in two, tensor parallelism shards the columns of each half in two. Rank
// 2 * f + t has shard t of half f; each element is its own index.
NestedShardedTensor fsdp_over_tensor_parallel(const ProcessGroup& world) {
  const std::int64_t half = world.rank() / 2, part = world.rank() % 2;
  const ShardMetadata upper({0, 0}, {4, 6}, on_rank(0)), lower({4, 0}, {4, 6}, on_rank(2));
  const ShardMetadata left({0, 0}, {4, 3}, on_rank(static_cast<int>(2 * half))),
      right({0, 3}, {4, 3}, on_rank(static_cast<int>(2 * half + 1)));
  const at::Tensor mine = indices({8, 6}).narrow(0, 4 * half, 4).narrow(1, 3 * part, 3).contiguous();
  // The inner group is given by its ranks in the world.
  const ShardedTensor inner = ShardedTensor::from_local_shards_and_global_metadata(
      {{mine, part == 0 ? left : right}}, metadata_of({left, right}, {4, 6}), world);
  return {{{inner, half == 0 ? upper : lower}}, metadata_of({upper, lower}, {8, 6})};
}

TEST(FlattenShardedTensorsTest, TheInnerShardBecomesAShardOfTheWhole) {
  run_local(4, [](const ProcessGroup& world) {
    const NestedShardedTensor nested = fsdp_over_tensor_parallel(world);
    const StateDict flat = flatten_sharded_tensors({{"model", Dict{{"w", nested}}}}, world);
    const auto& tensor = flat.at("model").get<Dict>().at("w").get<ShardedTensor>();
    EXPECT_EQ(tensor.size(), (Sizes{8, 6}));
    EXPECT_TRUE(tensor.process_group() == world);
    ASSERT_EQ(tensor.local_shards().size(), 1u);
    const Shard& shard = tensor.local_shards()[0];
    EXPECT_EQ(shard.metadata.shard_offsets, (Sizes{4 * (world.rank() / 2), 3 * (world.rank() % 2)}));
    EXPECT_EQ(shard.metadata.shard_sizes, (Sizes{4, 3}));
    EXPECT_EQ(shard.metadata.placement, on_rank(world.rank()));
    EXPECT_TRUE(shard.tensor.is_same(nested.local_shards[0].tensor.local_shards()[0].tensor));
  });
}

TEST(FlattenShardedTensorsTest, ANestedTensorIsSavedAndLoadedBoxByBox) {
  const auto storage = checkpoint::memory_storage();
  run_local(4, [&](const ProcessGroup& world) {
    save({{"model", Dict{{"w", fsdp_over_tensor_parallel(world)}}}}, storage, world);
    const NestedShardedTensor wanted = fsdp_over_tensor_parallel(world);
    const at::Tensor& mine = wanted.local_shards[0].tensor.local_shards()[0].tensor;
    const at::Tensor expected = mine.clone();
    mine.zero_();
    StateDict state{{"model", Dict{{"w", wanted}}}};
    load(state, storage, world);
    EXPECT_TRUE(at::equal(mine, expected));
  });
  StateDict state{{"model", Dict{{"w", at::zeros({8, 6}, at::kLong)}}}};
  load(state, storage);
  EXPECT_TRUE(at::equal(state.at("model").get<Dict>().at("w").get<at::Tensor>(), indices({8, 6})));
}

TEST(FlattenShardedTensorsTest, OtherShardsAreThoseOfOuterAndInnerOnAnotherRank) {
  run_local(4, [](const ProcessGroup& world) {
    const StateDict flat = flatten_sharded_tensors({{"w", fsdp_over_tensor_parallel(world)}}, world);
    const std::int64_t half = world.rank() / 2, part = world.rank() % 2;
    const RemoteDevice elsewhere = on_rank(world.rank() == 0 ? 1 : 0);
    const std::vector<ShardMetadata> expected = {{{4 - 4 * half, 0}, {4, 6}, elsewhere},
                                                 {{4 * half, 3 - 3 * part}, {4, 3}, elsewhere},
                                                 {{4 * half, 3 * part}, {4, 3}, on_rank(world.rank())}};
    const auto& tensor = flat.at("w").get<ShardedTensor>();
    EXPECT_EQ(tensor.metadata().shards_metadata, expected);
    EXPECT_EQ(tensor.metadata().tensor_properties.dtype, DType::int64);
  });
}

TEST(FlattenShardedTensorsTest, ATensorWithoutALocalShardIsLeftOut) {
  run_local(2, [](const ProcessGroup& world) {
    const ShardedTensor tensor = ShardedTensor::ones(chunk_spec(0, {1}), {4}, world);
    const StateDict flat = flatten_sharded_tensors({{"w", tensor}, {"n", NestedShardedTensor()}, {"step", 1}}, world);
    EXPECT_EQ(flat.contains("w"), world.rank() == 1);
    EXPECT_FALSE(flat.contains("n"));
    EXPECT_EQ(flat.at("step"), Value(1));
  });
}

TEST(FlattenShardedTensorsTest, ATensorWithSeveralLocalShardsIsKept) {
  const ProcessGroup alone;
  const ShardedTensor several = ShardedTensor::ones(chunk_spec(0, {0, 0}), {4}, alone);
  ASSERT_EQ(several.local_shards().size(), 2u);
  const ShardMetadata first({0}, {2}, on_rank(0)), second({2}, {2}, on_rank(0));
  const ShardedTensor inner = ShardedTensor::ones(chunk_spec(0, {0}), {2}, alone);
  const NestedShardedTensor nested{{{inner, first}, {inner, second}}, metadata_of({first, second}, {4})};
  const StateDict state{{"plain", several}, {"nested", nested}};
  const StateDict flat = flatten_sharded_tensors(state, alone);
  EXPECT_TRUE(flat.at("plain").get<ShardedTensor>().is_same(several));
  EXPECT_EQ(flat.at("nested").get<NestedShardedTensor>().local_shards.size(), 2u);
  EXPECT_EQ(Value(flat), Value(state));
}

TEST(FlattenShardedTensorsTest, WhatIsNotNestedIsKept) {
  const ShardedTensor tensor = ShardedTensor::ones(chunk_spec(0, {0}), {4});
  const StateDict state{{"w", tensor}, {"list", List{at::zeros({1}), 2}}, {"deep", Dict{{"x", Tuple{1}}}}};
  const StateDict flat = flatten_sharded_tensors(state);
  EXPECT_EQ(Value(flat), Value(state));
  EXPECT_TRUE(flat.at("w").get<ShardedTensor>().is_same(tensor));
}

TEST(FlattenShardedTensorsTest, InListsToo) {
  const ShardMetadata outer({0}, {4}, on_rank(0));
  const NestedShardedTensor nested{{{ShardedTensor::ones(chunk_spec(0, {0}), {4}), outer}},
                                   {{outer}, {4}, TensorProperties()}};
  const StateDict flat = flatten_sharded_tensors({{"list", List{NestedShardedTensor(), nested}}});
  EXPECT_TRUE(flat.at("list").get<List>()[0].is_none());
  EXPECT_EQ(flat.at("list").get<List>()[1], Value(ShardedTensor::ones(chunk_spec(0, {0}), {4})));
}

TEST(FlattenShardedTensorsTest, AnInnerTensorWithoutOneLocalShardIsAnErrorThatNamesThePath) {
  const ProcessGroup alone;
  const ShardMetadata outer({0}, {4}, on_rank(0));
  const auto nested = [&](const ShardedTensor& inner) {
    return StateDict{{"a", Dict{{"w", NestedShardedTensor{{{inner, outer}}, metadata_of({outer}, {4})}}}}};
  };
  EXPECT_ERROR(flatten_sharded_tensors(nested(ShardedTensor::ones(chunk_spec(0, {0, 0}), {4}, alone)), alone),
               ErrorCode::invalid_argument, "'a.w'", "2 local shards, expected 1");
  run_local(2, [&](const ProcessGroup& world) {
    if (world.rank() != 0) return;
    const ShardedTensor elsewhere = ShardedTensor::ones(chunk_spec(0, {1}), {4}, world);
    EXPECT_ERROR(flatten_sharded_tensors(nested(elsewhere), world), ErrorCode::invalid_argument, "'a.w'",
                 "0 local shards, expected 1");
  });
}

TEST(FlattenShardedTensorsTest, BoxesThatDoNotPartitionTheTensorAreAnError) {
  const ProcessGroup alone;
  const ShardedTensor inner = ShardedTensor::ones(chunk_spec(0, {0}), {3}, alone);
  const ShardMetadata outer({0}, {4}, on_rank(0));
  const StateDict state{{"w", NestedShardedTensor{{{inner, outer}}, {{outer}, {4}, TensorProperties()}}}};
  EXPECT_ERROR(flatten_sharded_tensors(state, alone), ErrorCode::invalid_argument, "'w'");
  const ShardedTensor matrix = ShardedTensor::ones(chunk_spec(0, {0}), {2, 2}, alone);
  const StateDict other{{"w", NestedShardedTensor{{{matrix, outer}}, {{outer}, {4}, TensorProperties()}}}};
  EXPECT_ERROR(flatten_sharded_tensors(other, alone), ErrorCode::invalid_argument, "'w'", "2 dimensions", "expected 1");
}

}  // namespace
}  // namespace tessera
