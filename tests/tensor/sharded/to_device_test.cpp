// Sharded tensors whose shards move to another device, and to another group of the same ranks.

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "support/error_matchers.h"
#include "tensor/sharding_support.h"
#include "tessera/comm/local_ranks.h"
#include "tessera/tensor/sharded_tensor.h"

namespace tessera {
namespace {

using testing::chunk_spec;
using testing::ranks_of;

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

}  // namespace
}  // namespace tessera
