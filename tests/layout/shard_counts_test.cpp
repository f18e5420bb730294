#include "tessera/layout/shard_counts.h"

#include <gtest/gtest.h>

namespace tessera {
namespace {

using Map = std::vector<std::vector<std::size_t>>;
using Counts = std::vector<std::int64_t>;

TEST(ShardCountsTest, EveryKindOfShardCounts) {
  const Placement rows = Placement::shard(0), columns = Placement::shard(-1), strided = Placement::strided_shard(0, 3),
                  replicated = Placement::replicate();
  const MeshLayout flattened({12, 6}, {4}, {strided});
  EXPECT_EQ(dim_map(flattened), (Map{{0}, {}}));
  EXPECT_EQ(num_shards_map(flattened), (Counts{4, 1}));
  EXPECT_EQ(num_shards(flattened), 4);

  const MeshLayout one_each({12, 6}, {2, 3}, {columns, rows});
  EXPECT_EQ(dim_map(one_each), (Map{{1}, {0}}));
  EXPECT_EQ(num_shards_map(one_each), (Counts{3, 2}));
  EXPECT_EQ(num_shards(one_each), 6);

  const MeshLayout twice({12, 6}, {2, 3, 5}, {strided, replicated, rows});
  EXPECT_EQ(dim_map(twice), (Map{{0, 2}, {}}));
  EXPECT_EQ(num_shards_map(twice), (Counts{10, 1}));
  EXPECT_EQ(num_shards(twice), 10);

  const MeshLayout none({12, 6}, {2, 3}, {Placement::partial(), replicated});
  EXPECT_EQ(dim_map(none), (Map{{}, {}}));
  EXPECT_EQ(num_shards(none), 1);
  EXPECT_EQ(num_shards(MeshLayout({}, {2}, {replicated})), 1);
}

}  // namespace
}  // namespace tessera
