// Sharded tensors of what ranks have without knowing the others' part, of metadata that describe one rank's view, and
// by a spec of a user's own.

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "support/error_matchers.h"
#include "tensor/sharding_support.h"
#include "tessera/comm/local_ranks.h"
#include "tessera/tensor/from_chunks.h"
#include "tessera/tensor/sharded_tensor.h"

namespace tessera {
namespace {

using testing::full_of;
using testing::indices;
using testing::on_rank;
using testing::Sizes;

// PyTorch: init_from_local_shards with None in the size.
TEST(FromChunksTest, SizeAndOffsetsAreComputedFromTheRanksChunks) {
  for (const int world : {1, 2, 3, 5}) {
    run_local(world, [&](const ProcessGroup& group) {
      for (const std::int64_t dim : {0, 1, 2}) {
        // Rank r has r rows, so that rank 0 has none; alone it has 2.
        std::vector<std::int64_t> lengths;
        for (int rank = 0; rank < world; ++rank) lengths.push_back(world == 1 ? 2 : rank);
        Sizes size = {3, 2, 4};
        size[static_cast<std::size_t>(dim)] = std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0});
        const at::Tensor full = indices(size);
        const std::vector<at::Tensor> chunks = full.split_with_sizes(lengths, dim);
        const at::Tensor mine = chunks[static_cast<std::size_t>(group.rank())].contiguous();
        const ShardedTensor tensor = sharded_tensor_from_chunks(mine, dim, group);
        EXPECT_EQ(tensor.size(), size);
        EXPECT_TRUE(tensor.local_tensor().is_same(mine));
        EXPECT_TRUE(at::equal(full_of(tensor), full)) << world << " ranks, dimension " << dim;
        std::int64_t offset = 0;
        for (int rank = 0; rank < world; ++rank) {
          const ShardMetadata& shard = tensor.metadata().shards_metadata.at(static_cast<std::size_t>(rank));
          EXPECT_EQ(shard.shard_offsets[static_cast<std::size_t>(dim)], offset);
          EXPECT_EQ(shard.placement->rank(), rank);
          offset += lengths[static_cast<std::size_t>(rank)];
        }
      }
    });
  }
}

TEST(FromChunksTest, WhatDoesNotFitIsAnErrorOnAllRanks) {
  run_local(3, [](const ProcessGroup& group) {
    const bool is_odd_one = group.rank() == 2;
    const auto refuse = [&](const at::Tensor& odd, std::int64_t dim, const std::vector<std::string>& whats) {
      for (const std::string& what : whats) {
        EXPECT_ERROR(sharded_tensor_from_chunks(is_odd_one ? odd : at::ones({2, 3}), dim, group),
                     ErrorCode::invalid_argument, what);
      }
    };
    refuse(
        at::ones({5, 4}), 0,
        {"sharded tensor from local chunks: the chunk of rank 2 has shape [5, 4], expected that of rank 0 except for "
         "dimension 0"});
    refuse(at::ones({2}), 0, {"dimensions"});
    refuse(at::Tensor(), 0, {"rank 2: the chunk is undefined"});
    refuse(at::ones({2, 3}), 2, {"dimension 2 of a chunk of shape [2, 3]"});
    refuse(at::ones({2, 3}), -1, {"dimension -1 of a chunk of shape [2, 3]"});
    refuse(at::ones({2, 3}, at::kInt), 1, {R"(dtype is "float32" on rank 0 and "int32" on rank 2)"});
    refuse(at::ones({3, 2}).t(), 0, {"the tensor is not contiguous"});
    EXPECT_ERROR(sharded_tensor_from_chunks(at::ones({2, 2}), is_odd_one ? 1 : 0, group), ErrorCode::invalid_argument,
                 "dim 0", "dim 1");
  });
}

ShardedTensorMetadata metadata_of(Sizes size, std::vector<ShardMetadata> shards) {
  ShardedTensorMetadata metadata;
  metadata.size = std::move(size);
  metadata.shards_metadata = std::move(shards);
  return metadata;
}

// Each rank has all elements, and describes the other ranks' shards as empty ones.
TEST(LocalViewTest, MetadataMayDifferByRankAndGiveEachRankAllElements) {
  run_local(4, [](const ProcessGroup& group) {
    const auto view_from = [&](std::int64_t row) {
      std::vector<ShardMetadata> shards;
      for (int rank = 0; rank < group.size(); ++rank) {
        if (rank == group.rank()) {
          shards.emplace_back(Sizes{row, 0}, Sizes{5, 5}, on_rank(rank));
        } else {
          shards.emplace_back(Sizes{rank < group.rank() ? 0 : 5, 0}, Sizes{0, 0}, on_rank(rank));
        }
      }
      return shards;
    };
    const auto make = [&](std::int64_t row) {
      const std::vector<ShardMetadata> shards = view_from(row);
      const at::Tensor local = at::full({5, 5}, static_cast<float>(group.rank()));
      return ShardedTensor::from_local_shards_and_global_metadata(
          {{local, shards[static_cast<std::size_t>(group.rank())]}}, metadata_of({5, 5}, shards), group);
    };
    const ShardedTensor tensor = make(0);
    EXPECT_EQ(tensor.size(), (Sizes{5, 5}));
    EXPECT_TRUE(at::equal(tensor.local_tensor(), at::full({5, 5}, static_cast<float>(group.rank()))));
    EXPECT_EQ(tensor.local_shards()[0].metadata.shard_sizes, (Sizes{5, 5}));
    EXPECT_EQ(tensor.metadata().shards_metadata, view_from(0));
    EXPECT_ERROR(make(1), ErrorCode::invalid_argument, "[1, 6)x[0, 5)");
  });
}

TEST(LocalViewTest, ATensorWithoutElementsHasAnEmptyShardOnEachRank) {
  run_local(4, [](const ProcessGroup& group) {
    std::vector<ShardMetadata> shards;
    for (int rank = 0; rank < group.size(); ++rank) shards.emplace_back(Sizes{0, 0}, Sizes{0, 0}, on_rank(rank));
    const Shard mine = {at::empty({0, 0}), shards[static_cast<std::size_t>(group.rank())]};
    const ShardedTensor tensor =
        ShardedTensor::from_local_shards_and_global_metadata({mine}, metadata_of({0, 0}, shards), group);
    EXPECT_EQ(tensor.size(), (Sizes{0, 0}));
    EXPECT_EQ(tensor.numel(), 0);
    EXPECT_TRUE(tensor.local_tensor().is_same(mine.tensor));
    EXPECT_EQ(tensor.metadata().shards_metadata, shards);
    EXPECT_EQ(full_of(tensor).numel(), 0);
  });
}

// A spec of a user's own: the last rank gets half of the rows, the other ranks share the rest. PyTorch:
// GridShardingSpec and other subclasses of ShardingSpec, with ones() and shard_tensor().
class LastHalfSpec final : public ShardingSpec {
 public:
  explicit LastHalfSpec(int ranks) : ranks_(ranks) {}
  std::string_view kind() const override { return "LastHalfSpec"; }
  ShardedTensorMetadata build_metadata(std::span<const std::int64_t> size,
                                       const TensorProperties& properties) const override {
    ShardedTensorMetadata metadata;
    metadata.size.assign(size.begin(), size.end());
    metadata.tensor_properties = properties;
    std::int64_t begin = 0;
    for (int rank = 0; rank < ranks_; ++rank) {
      const std::int64_t before_last = size[0] / 2;
      const std::int64_t end = rank == ranks_ - 1 ? size[0] : before_last * (rank + 1) / (ranks_ - 1);
      Sizes offsets(size.size(), 0), sizes = metadata.size;
      offsets[0] = begin;
      sizes[0] = end - begin;
      metadata.shards_metadata.emplace_back(std::move(offsets), std::move(sizes), on_rank(rank));
      begin = end;
    }
    return metadata;
  }
  bool equals(const ShardingSpec& other) const override { return other.to_string() == to_string(); }
  std::string to_string() const override { return fmt::format("LastHalfSpec({})", ranks_); }

 private:
  int ranks_;
};

TEST(OwnSpecTest, FactoriesAndAFullTensorAreShardedByIt) {
  for (const int world : {1, 2, 4}) {
    run_local(world, [&](const ProcessGroup& group) {
      const auto spec = std::make_shared<LastHalfSpec>(world);
      const Sizes size = {9, 2};
      EXPECT_TRUE(at::equal(full_of(ShardedTensor::ones(spec, size, group)), at::ones(size)));
      EXPECT_TRUE(at::equal(full_of(ShardedTensor::full(spec, size, 2.5, group)), at::full(size, 2.5F)));
      const ShardedTensor zeros = ShardedTensor::zeros(spec, size, group);
      EXPECT_EQ(&zeros.sharding_spec(), spec.get());
      const std::int64_t last = world == 1 ? 9 : 5;
      if (group.rank() == world - 1) {
        EXPECT_EQ(zeros.local_tensor().size(0), last);
      }
      ShardedTensor sharded =
          ShardedTensor::from_tensor(group.rank() == world - 1 ? indices(size) : at::Tensor(), spec, group, world - 1);
      EXPECT_TRUE(testing::holds_indices(sharded));
      EXPECT_TRUE(at::equal(full_of(sharded), indices(size)));
      sharded.reshard(testing::chunk_spec(1, testing::ranks_of(world)));
      EXPECT_TRUE(testing::holds_indices(sharded));
      sharded.reshard(std::make_shared<LastHalfSpec>(world));
      EXPECT_TRUE(testing::holds_indices(sharded));
      EXPECT_EQ(sharded.sharding_spec(), *spec);
    });
  }
}

}  // namespace
}  // namespace tessera
