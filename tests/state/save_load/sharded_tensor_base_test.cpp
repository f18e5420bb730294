// The shards of all ranks in one process, without a group: their metadata, and checkpoints of them.

#include "tessera/tensor/sharded/sharded_tensor_base.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "support/error_matchers.h"
#include "support/temporary_directory.h"
#include "tensor/sharding_support.h"
#include "tessera/comm/local_ranks.h"
#include "tessera/state/load.h"
#include "tessera/state/save.h"
#include "tessera/tensor/torch_types.h"

namespace tessera {
namespace {

using testing::chunk_spec;
using testing::holds_indices;
using testing::indices;
using testing::on_rank;
using testing::TemporaryDirectory;

// Four shards of [10, 10], one of each rank.
ShardedTensorMetadata metadata_of_four(at::ScalarType dtype = at::kLong) {
  ShardedTensorMetadata metadata;
  metadata.size = {10, 10};
  metadata.tensor_properties = properties_of(at::empty({0}, dtype));
  for (int rank = 0; rank < 4; ++rank) {
    metadata.shards_metadata.push_back({{rank / 2 * 5, rank % 2 * 5}, {5, 5}, on_rank(rank)});
  }
  return metadata;
}

std::vector<Shard> shards_of(const at::Tensor& full, const ShardedTensorMetadata& metadata) {
  std::vector<Shard> shards;
  for (const ShardMetadata& shard : metadata.shards_metadata) shards.push_back({box_view(full, shard.box()), shard});
  return shards;
}

// PyTorch: test_st_base_init_from_local_shards_and_global_metadata, TestCreateTensorNoProcessGroupMode.
TEST(ShardedTensorBaseTest, HasTheShardsOfAllRanksAndTheirMetadata) {
  const ShardedTensorMetadata metadata = metadata_of_four();
  const at::Tensor full = indices({10, 10});
  const auto tensor = ShardedTensorBase::from_local_shards_and_global_metadata(shards_of(full, metadata), metadata);
  EXPECT_EQ(tensor->metadata(), metadata);
  EXPECT_EQ(tensor->sharding_spec().kind(), "EnumerableShardingSpec");
  ASSERT_EQ(tensor->local_shards().size(), 4u);
  for (std::size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(tensor->local_shards()[i].metadata, metadata.shards_metadata[i]);
    EXPECT_FALSE(tensor->local_tensor(i).is_contiguous());  // a view of the full tensor
    EXPECT_TRUE(tensor->local_tensor(i).equal(box_view(full, metadata.shards_metadata[i].box())));
  }
  const auto part = ShardedTensorBase::from_local_shards_and_global_metadata({shards_of(full, metadata)[2]}, metadata);
  EXPECT_EQ(part->local_chunks(), std::vector<Box>{Box({5, 0}, {5, 5})});
  EXPECT_ERROR(part->local_tensor(1), ErrorCode::invalid_argument,
               "sharded tensor of size [10, 10]: local tensor 1, expected one of its 1 local shards");
}

TEST(ShardedTensorBaseTest, OneProcessSavesAndLoadsTheShardsOfAllRanks) {
  const TemporaryDirectory directory;
  const ShardedTensorMetadata metadata = metadata_of_four();
  const at::Tensor full = indices({10, 10}), zeros = at::zeros({10, 10}, at::kLong);
  save({{"w", ShardedTensorBase::from_local_shards_and_global_metadata(shards_of(full, metadata), metadata)}},
       directory.path());
  EXPECT_EQ(checkpoint::Checkpoint::open(directory.path())->tensors()[0].chunks.size(), 4u);
  run_local(3, [&](const ProcessGroup& group) {
    ShardedTensorOptions options;
    options.dtype = at::kLong;
    const ShardedTensor tensor = ShardedTensor::zeros(chunk_spec(1, {2, 0, 1}), {10, 10}, group, options);
    StateDict state{{"w", tensor}};
    load(state, directory.path(), group);
    EXPECT_TRUE(holds_indices(tensor));
  });
  StateDict state{
      {"w", ShardedTensorBase::from_local_shards_and_global_metadata(shards_of(zeros, metadata), metadata)}};
  load(state, directory.path());
  EXPECT_TRUE(zeros.equal(full));
}

TEST(ShardedTensorBaseTest, ShardsAndMetadataMustFit) {
  const at::Tensor full = indices({10, 10});
  const ShardedTensorMetadata good = metadata_of_four();
  const std::vector<Shard> shards = shards_of(full, good);
  const auto refuse = [](std::vector<Shard> given, const ShardedTensorMetadata& metadata, const std::string& what) {
    EXPECT_ERROR(ShardedTensorBase::from_local_shards_and_global_metadata(std::move(given), metadata),
                 ErrorCode::invalid_argument, what);
  };
  ShardedTensorMetadata metadata = good;
  metadata.shards_metadata.pop_back();
  refuse({}, metadata, "[5, 10)x[5, 10)");
  metadata.shards_metadata.clear();
  refuse({}, metadata, "its metadata has no shards");
  metadata = good;
  metadata.shards_metadata[1].shard_offsets = {0, 4};
  refuse({}, metadata, "overlap");
  refuse({shards[0], shards[0]}, good, "is given twice");
  refuse({{shards[0].tensor, {{0, 0}, {5, 5}, on_rank(1)}}}, good, "not in the metadata");
  refuse({{at::Tensor(), shards[0].metadata}}, good, "tensor undefined");
  refuse({{shards[0].tensor.slice(0, 1), shards[0].metadata}}, good, "size [4, 5], expected [5, 5]");
  refuse(shards, metadata_of_four(at::kFloat), "dtype int64, expected float32");
  metadata = metadata_of_four(at::kFloat);
  metadata.tensor_properties.requires_grad = true;
  refuse(shards_of(full.to(at::kFloat), metadata), metadata, "requires_grad false, expected true");
  refuse({{at::empty({5, 5}, at::TensorOptions(at::kMeta).dtype(at::kLong)), shards[0].metadata}}, good, "device meta");
}

}  // namespace
}  // namespace tessera
