// Sharded tensors whose shards move to another device, and to another group of the same ranks.

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "support/error_matchers.h"
#include "tensor/sharding_support.h"
#include "tessera/comm/local_ranks.h"
#include "tessera/tensor/ops.h"
#include "tessera/tensor/partial_tensor.h"
#include "tessera/tensor/shard_module.h"
#include "tessera/tensor/sharded_tensor.h"

namespace tessera {
namespace {

using testing::chunk_spec;
using testing::close;
using testing::full_of;
using testing::random;
using testing::ranks_of;
using testing::shard;
using testing::SpecPtr;

// PyTorch: test_sharded_tensor_to_cpu, with meta in place of CUDA.
TEST(ToDeviceTest, OfMixedDevicesEveryShardMovesAndTheSpecStaysOfItsKind) {
  run_local(4, [](const ProcessGroup& group) {
    const ProcessGroup other = *group.subgroup(ranks_of(4));
    const Device meta = Device::parse("meta");
    const auto mixed = std::make_shared<ChunkShardingSpec>(
        0, std::vector<RemoteDevice>{{0, Device{}}, {1, Device{}}, {2, meta}, {3, meta}});
    const ShardedTensor tensor = ShardedTensor::zeros(mixed, {10, 20}, group);
    EXPECT_EQ(tensor.device().is_meta(), group.rank() >= 2);
    const ShardedTensor moved = tensor.to({.device = at::Device(at::kMeta), .group = other});
    EXPECT_FALSE(moved.is_same(tensor));
    EXPECT_TRUE(moved.local_tensor().is_meta());
    EXPECT_EQ(moved.process_group().name(), other.name());
    const auto* spec = dynamic_cast<const ChunkShardingSpec*>(&moved.sharding_spec());
    ASSERT_NE(spec, nullptr);
    EXPECT_EQ(spec->dim(), 0);
    ASSERT_EQ(moved.metadata().shards_metadata.size(), 4u);
    for (std::size_t i = 0; i < 4; ++i) {
      const ShardMetadata &before = tensor.metadata().shards_metadata[i], &after = moved.metadata().shards_metadata[i];
      EXPECT_EQ(after.shard_offsets, before.shard_offsets);
      EXPECT_EQ(after.shard_sizes, before.shard_sizes);
      EXPECT_EQ(to_string(after.placement->device()), "meta");
    }
    const ShardedTensor converted = tensor.to({.dtype = at::kDouble});
    EXPECT_EQ(converted.scalar_type(), at::kDouble);
    EXPECT_TRUE(converted.sharding_spec() == *mixed);
    EXPECT_EQ(converted.metadata().shards_metadata, tensor.metadata().shards_metadata);
    EXPECT_EQ(to_string(tensor.metadata().shards_metadata[0].placement->device()), "cpu");
    const ShardedTensor on_cpu = ShardedTensor::zeros(chunk_spec(0, ranks_of(4)), {10, 20}, group);
    EXPECT_TRUE(on_cpu.cpu().is_same(on_cpu));
  });
}

TEST(ToDeviceTest, InNoGradModeNoShardRequiresGradEvenIfItDoesNotMove) {
  run_local(2, [](const ProcessGroup& group) {
    const auto mixed =
        std::make_shared<ChunkShardingSpec>(0, std::vector<RemoteDevice>{{0, Device{}}, {1, Device::parse("meta")}});
    const ShardedTensor tensor = ShardedTensor::zeros(mixed, {4, 2}, group, {.requires_grad = true});
    EXPECT_TRUE(tensor.to({.device = at::Device(at::kMeta)}).local_tensor().requires_grad());
    const at::NoGradGuard no_grad;
    const ShardedTensor moved = tensor.to({.device = at::Device(at::kMeta)});
    EXPECT_FALSE(moved.requires_grad());
    EXPECT_FALSE(moved.local_tensor().requires_grad());
  });
}

// Returns a spec in which this rank has an index for the devices of the others, but not for its own, as the ranks'
// specs differ after `to` where each rank has a device of its own.
SpecPtr spec_known_here(std::int64_t dim, const ProcessGroup& group) {
  std::vector<RemoteDevice> placements;
  for (int rank = 0; rank < group.size(); ++rank)
    placements.emplace_back(rank, rank == group.rank() ? Device{} : Device::parse("cpu:0"));
  return std::make_shared<ChunkShardingSpec>(dim, placements);
}

TEST(ToDeviceTest, RanksNeedNotKnowTheIndicesOfEachOthersDevices) {
  run_local(2, [](const ProcessGroup& group) {
    const SpecPtr rows = spec_known_here(0, group), columns = spec_known_here(1, group), plain = chunk_spec(0, {0, 1});
    const at::Tensor full = random({6, 4}, 1), input = random({3, 4}, 2);
    const ShardedTensor a = shard(full, plain, group), b = shard(full, rows, group);
    ASSERT_FALSE(a.metadata() == b.metadata());
    EXPECT_TRUE(ops::equal(a, b));
    EXPECT_TRUE(ops::allclose(b, a, {}));
    EXPECT_FALSE(ops::equal(ops::add(b, 1), a));
    EXPECT_TRUE(ops::equal(ShardedTensor::from_state(b.state(), group), a));
    EXPECT_TRUE(close(full_of(ops::add(a, b)), full * 2));
    EXPECT_TRUE(ops::equal(ops::copy_(ops::zeros_like(b), a, false), a));
    EXPECT_TRUE(
        close(full_of(std::get<ShardedTensor>(ops::linear(input, b, {}))), at::linear(at::cat({input, input}), full)));
    EXPECT_TRUE(close(ops::embedding(at::arange(6), b, {}), full));
    ops::EmbeddingBagOptions sums;
    sums.mode = "sum";
    EXPECT_TRUE(close(ops::embedding_bag(at::arange(6).view({2, 3}), b, sums), full.view({2, 3, 4}).sum(1)));
    const at::Tensor left = random({4, 2, 3}, 3), right = random({4, 3, 2}, 4);
    EXPECT_TRUE(close(full_of(ops::bmm(shard(left, plain, group), shard(right, rows, group))), at::bmm(left, right)));

    ShardedTensor c = ShardedTensor::from_tensor(full, rows, group);
    EXPECT_TRUE(ops::equal(c, a));
    c.reshard(columns);
    EXPECT_TRUE(close(full_of(c), full));
    const PartialTensor partial =
        std::get<PartialTensor>(ops::linear(shard(input, chunk_spec(1, {0, 1}), group), c, {}));
    EXPECT_TRUE(close(full_of(partial.reshard(columns)), at::linear(input, full)));
    ShardedLinear layer(4, 6);
    shard_parameter(*layer, "weight", rows, group);
    layer(at::ones({2, 4}));
    // Another spec on rank 1 alone.
    ShardedTensor d = shard(full, rows, group);
    d.reshard(
        std::make_shared<ChunkShardingSpec>(0, std::vector<RemoteDevice>{{0, Device{}}, {1, Device::parse("cpu:0")}}));
    EXPECT_TRUE(close(full_of(d), full));
  });
}

}  // namespace
}  // namespace tessera
