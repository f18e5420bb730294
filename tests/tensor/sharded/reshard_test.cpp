// Resharding from every spec to every other, in every way of exchange: only elements whose rank changes are sent.

#include "tensor/sharded/reshard.h"

#include <gtest/gtest.h>

#include "support/chaos.h"
#include "tensor/sharding_support.h"
#include "tessera/comm/local_ranks.h"

namespace tessera {
namespace {

using testing::chunk_spec;
using testing::fill_with_indices;
using testing::grid_spec;
using testing::indices;
using testing::Sizes;
using testing::SpecPtr;
using testing::specs_of_every_kind;

enum class Way : std::uint8_t { packed, many_rounds, unpacked };

ExchangeOptions options_of(Way way) {
  ExchangeOptions options;
  options.use_shared_memory = way == Way::unpacked;
  options.run_bytes = 1;
  options.unpacked_round_bytes = 64;
  if (way == Way::many_rounds) options.round_bytes = 24;
  return options;
}

std::string name_of(Way way) {
  return way == Way::packed ? "Packed" : way == Way::many_rounds ? "InManyRounds" : "InSharedMemory";
}

// Returns whether the elements of the shards are their indices.
bool hold_indices(const std::vector<Shard>& shards, const at::Tensor& full) {
  return std::all_of(shards.begin(), shards.end(), [&](const Shard& shard) {
    return shard.tensor.numel() == 0 || at::equal(shard.tensor, box_view(full, shard.metadata.box()));
  });
}

// Looks up the rank of each element, one by one.
at::Tensor owners(const ShardedTensorMetadata& metadata) {
  const at::Tensor owners = at::full(metadata.size, -1, at::kLong);
  for (const ShardMetadata& shard : metadata.shards_metadata) {
    if (!is_empty(shard.box())) box_view(owners, shard.box()).fill_(*shard.placement->rank());
  }
  return owners;
}

// Returns, by source rank, the bytes that `rank` has after resharding but not before.
std::vector<std::int64_t> bytes_that_come(const ShardedTensorMetadata& before, const ShardedTensorMetadata& after,
                                          int rank, int world, std::int64_t element_bytes) {
  const at::Tensor had = owners(before).view({-1}), has = owners(after).view({-1});
  std::vector<std::int64_t> bytes(static_cast<std::size_t>(world), 0);
  for (std::int64_t i = 0; i < had.numel(); ++i) {
    const auto source = had.data_ptr<std::int64_t>()[i];
    if (has.data_ptr<std::int64_t>()[i] == rank && source != rank) {
      bytes[static_cast<std::size_t>(source)] += element_bytes;
    }
  }
  return bytes;
}

class ReshardWayTest : public ::testing::TestWithParam<std::tuple<int, Way>> {
 protected:
  int world() const { return std::get<0>(GetParam()); }
  ExchangeOptions options() const { return options_of(std::get<1>(GetParam())); }
};
INSTANTIATE_TEST_SUITE_P(Worlds, ReshardWayTest,
                         ::testing::Combine(::testing::Values(1, 2, 3, 4, 8),
                                            ::testing::Values(Way::packed, Way::many_rounds, Way::unpacked)),
                         [](const auto& test) {
                           return name_of(std::get<1>(test.param)) + std::to_string(std::get<0>(test.param));
                         });

TEST_P(ReshardWayTest, EverySpecToEverySpecMovesWhatChangesItsRankAndNothingElse) {
  run_local(world(), [&](const ProcessGroup& group) {
    testing::SampleIfSanitized sample(11);
    for (const Sizes& size : {Sizes{7}, Sizes{5, 3}, Sizes{3, 2, 5}}) {
      const at::Tensor full = indices(size);
      const std::vector<SpecPtr> specs = specs_of_every_kind(size, world());
      for (const SpecPtr& from : specs) {
        ShardedTensorOptions of_longs;
        of_longs.dtype = at::kLong;
        const ShardedTensor tensor = ShardedTensor::empty(from, size, group, of_longs);
        fill_with_indices(tensor);
        for (const SpecPtr& to : specs) {
          if (!sample.takes_next()) continue;
          const ShardedTensorMetadata target = to->build_metadata(size, tensor.metadata().tensor_properties);
          const Resharded resharded = reshard(tensor, target, options());
          ASSERT_TRUE(hold_indices(resharded.shards, full)) << from->to_string() << "\nto " << to->to_string();
          ASSERT_EQ(resharded.received_bytes,
                    bytes_that_come(tensor.metadata(), target, group.rank(), world(), sizeof(std::int64_t)))
              << from->to_string() << "\nto " << to->to_string();
        }
      }
    }
  });
}

TEST_P(ReshardWayTest, EveryDtype) {
  run_local(world(), [&](const ProcessGroup& group) {
    const Sizes size = {5, 4};
    for (const at::ScalarType dtype :
         {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kByte, at::kChar, at::kShort, at::kInt, at::kLong,
          at::kBool, at::kComplexFloat, at::kComplexDouble}) {
      ShardedTensorOptions of_dtype;
      of_dtype.dtype = dtype;
      const ShardedTensor tensor =
          ShardedTensor::empty(chunk_spec(0, testing::permuted_ranks(world())), size, group, of_dtype);
      fill_with_indices(tensor);
      const SpecPtr to = grid_spec(size, {2, 2}, testing::ranks_of(world()));
      const Resharded resharded =
          reshard(tensor, to->build_metadata(size, tensor.metadata().tensor_properties), options());
      EXPECT_TRUE(hold_indices(resharded.shards, indices(size, dtype))) << dtype;
    }
  });
}

// Large enough for huge pages (on up to 4 ranks), for lists of ranges longer than one system call takes, and for
// several rounds.
TEST_P(ReshardWayTest, ALargeTensorThereAndBack) {
  run_local(world(), [&](const ProcessGroup& group) {
    const Sizes size = {3001, 751};
    const at::Tensor full = indices(size, at::kInt);
    ShardedTensorOptions of_ints;
    of_ints.dtype = at::kInt;
    ExchangeOptions how = options();
    how.round_bytes = std::max(how.round_bytes / 16, std::int64_t{64} << 10);
    how.unpacked_round_bytes = std::max(how.unpacked_round_bytes, std::int64_t{1} << 20);
    const std::vector<int> ranks = testing::ranks_of(world());
    const std::vector<SpecPtr> specs = {chunk_spec(0, ranks), chunk_spec(1, ranks), grid_spec(size, {700, 450}, ranks)};
    testing::SampleIfSanitized sample(5);
    for (const SpecPtr& from : specs) {
      const ShardedTensor tensor = ShardedTensor::empty(from, size, group, of_ints);
      fill_with_indices(tensor);
      for (const SpecPtr& to : specs) {
        if (!sample.takes_next()) continue;
        const ShardedTensorMetadata target = to->build_metadata(size, tensor.metadata().tensor_properties);
        const Resharded resharded = reshard(tensor, target, how);
        ASSERT_TRUE(hold_indices(resharded.shards, full)) << from->to_string() << "\nto " << to->to_string();
      }
    }
  });
}

TEST(ReshardShardsTest, AConjugateViewIsReadAsWhatItIs) {
  const at::Tensor numbers = at::randn({4, 2}, at::kComplexFloat);
  const ShardedTensor tensor = ShardedTensor::from_local_tensor(numbers.conj(), chunk_spec(0, {0}), {4, 2});
  const ShardedTensorMetadata target =
      grid_spec({4, 2}, {2, 2}, {0})->build_metadata(Sizes{4, 2}, tensor.metadata().tensor_properties);
  EXPECT_TRUE(hold_indices(reshard(tensor, target, {}).shards, numbers.conj().resolve_conj()));
}

}  // namespace
}  // namespace tessera
