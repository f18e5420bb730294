#include "tessera/layout/shard_order.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "layout/mesh_cases.h"
#include "support/error_matchers.h"
#include "tessera/layout/mesh_layout.h"

namespace tessera {
namespace {

using testing::cross;
using testing::P;
using testing::R;
using testing::S0;
using testing::S1;
using testing::Sizes;

// Every order of the mesh dimensions that shard each tensor dimension.
std::vector<ShardOrder> orders_of(const Placements& placements) {
  std::vector<ShardOrder> all = {{}};
  for (const ShardOrderEntry& entry : default_shard_order(placements)) {
    std::vector<ShardOrder> longer;
    for (const ShardOrder& order : all) {
      ShardOrderEntry next = entry;
      do {
        longer.push_back(order);
        longer.back().push_back(next);
      } while (std::next_permutation(next.mesh_dims.begin(), next.mesh_dims.end()));
    }
    all = std::move(longer);
  }
  return all;
}

// The interval of `length` that a rank gets if the mesh dimensions split it one after the other.
Interval split_in_order(std::int64_t length, const Sizes& mesh_dims, const Sizes& mesh_shape, const Sizes& coordinate) {
  Interval part{0, length};
  for (const std::int64_t m : mesh_dims) {
    const auto dim = static_cast<std::size_t>(m);
    const std::int64_t has = part.end - part.begin, chunk = (has + mesh_shape[dim] - 1) / mesh_shape[dim];
    const std::int64_t begin = std::min(has, chunk * coordinate[dim]), end = std::min(has, begin + chunk);
    part = {part.begin + begin, part.begin + end};
  }
  return part;
}

TEST(ShardOrderTest, TheDefaultIsFromTheFirstMeshDimensionToTheLast) {
  EXPECT_EQ(default_shard_order(Placements{S1, S0, R, S1}), (ShardOrder{{0, {1}}, {1, {0, 3}}}));
  EXPECT_EQ(default_shard_order(Placements{R, P}), ShardOrder());
  EXPECT_EQ(with_shard_order(Placements{S0, S0}, {{0, {0, 1}}}, Sizes{2, 4}), (Placements{S0, S0}));
}

TEST(ShardOrderTest, StridedShardsExpressEveryOrder) {
  for (const Sizes& mesh : {Sizes{2, 4}, Sizes{4, 3, 2}, Sizes{2, 2, 3, 2}}) {
    for (const Placements& placements : cross({R, S0, S1}, mesh.size())) {
      for (const ShardOrder& order : orders_of(placements)) {
        const Placements ordered = with_shard_order(placements, order, mesh);
        ASSERT_EQ(shard_order(ordered, mesh), order) << to_string(ordered);
        const Sizes size = {144, 48};  // divisible by the ranks
        const MeshLayout layout(size, mesh, ordered);
        for (std::int64_t rank = 0; rank < mesh_size(mesh); ++rank) {
          const Sizes at = mesh_coordinate(mesh, rank);
          for (const ShardOrderEntry& entry : order) {
            const auto dim = static_cast<std::size_t>(entry.tensor_dim);
            const Interval expected = split_in_order(size[dim], entry.mesh_dims, mesh, at);
            ASSERT_EQ(layout.local_intervals(dim, at), std::vector<Interval>{expected}) << to_string(ordered, order);
          }
        }
      }
    }
  }
  EXPECT_EQ(with_shard_order(Placements{S0, S0, S0}, {{0, {2, 0, 1}}}, Sizes{4, 3, 2}),
            (Placements{Placement::strided_shard(0, 2), Placement::strided_shard(0, 2), S0}));
}

// A strided shard splits what it is given, so with uneven sizes only the partition is the law.
TEST(ShardOrderTest, UnevenSizesArePartitioned) {
  for (std::int64_t length = 0; length < 14; ++length) {
    for (const Sizes& mesh : {Sizes{2, 2}, Sizes{2, 3}, Sizes{3, 2}, Sizes{4, 1}}) {
      const MeshLayout layout({length}, mesh, with_shard_order(Placements{S0, S0}, {{0, {1, 0}}}, mesh));
      std::vector<int> owners(static_cast<std::size_t>(length));
      for (std::int64_t rank = 0; rank < mesh_size(mesh); ++rank) {
        for (const Interval& part : layout.local_intervals(0, mesh_coordinate(mesh, rank))) {
          for (std::int64_t i = part.begin; i < part.end; ++i) ++owners[static_cast<std::size_t>(i)];
        }
      }
      ASSERT_THAT(owners, ::testing::Each(1)) << length;
    }
  }
}

TEST(ShardOrderTest, StridedShardsThatExpressNoOrderHaveNone) {
  EXPECT_EQ(shard_order(Placements{Placement::strided_shard(0, 3), S0}, Sizes{2, 2}), std::nullopt);
  EXPECT_EQ(shard_order(Placements{Placement::strided_shard(0, 2), S1}, Sizes{2, 2}), std::nullopt);
  EXPECT_EQ(shard_order(Placements{S0, Placement::strided_shard(0, 2)}, Sizes{2, 2}), std::nullopt);
  EXPECT_EQ(shard_order(Placements{R, P}, Sizes{2, 2}), ShardOrder());
}

TEST(ShardOrderTest, OrdersThatDontFitThePlacementsAreRefused) {
  const auto refused = [](const Placements& placements, const ShardOrder& order, const char* expected) {
    EXPECT_ERROR(with_shard_order(placements, order, Sizes{2, 2}), ErrorCode::invalid_argument, expected);
  };
  refused({S0, S0}, {{0, {1}}}, "shard order {0: [1]} of placements [S(0), S(0)]: expected the sharded tensor");
  refused({S0, S0}, {{0, {1, 2}}}, "expected the sharded tensor dimensions");
  refused({S0, S0}, {{0, {1, 1}}}, "expected the sharded tensor dimensions");
  refused({S0, S0}, {{0, {}}}, "expected the sharded tensor dimensions");
  refused({S0, S1}, {{1, {1}}, {0, {0}}}, "expected the sharded tensor dimensions, ascending");
  refused({S0, R}, {{0, {0}}, {-1, {1}}}, "expected the sharded tensor dimensions");
  refused({S0, R}, {}, "shard order {} of placements [S(0), R]");
  refused({Placement::strided_shard(0, 2), S0}, {{0, {1, 0}}}, "expected placements without strided shards");
  refused({S0}, {{0, {0}}}, "expected one for each of 2 mesh dimensions");
}

TEST(ShardOrderTest, PrintsAsPyTorchDoes) {
  EXPECT_EQ(to_string(Placements{P, S1, S1, R}, {{1, {2, 1}}}), "P(sum)S(1)[1]S(1)[0]R");
  EXPECT_EQ(to_string(Placements{S0, S1}, {{0, {0}}, {1, {1}}}), "S(0)S(1)");
}

}  // namespace
}  // namespace tessera
