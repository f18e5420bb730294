#include "tensor/dtensor/rank_redistribution.h"

#include <gtest/gtest.h>

#include <thread>

#include "layout/mesh_cases.h"

namespace tessera {
namespace {

using testing::R;
using testing::S0;
using testing::S1;

TEST(RankRedistributionTest, APlanIsMadeOnceForEachPairOfLayoutsAndRank) {
  const MeshLayout from({8, 4}, {4}, {S0}), to({8, 4}, {4}, {R});
  const auto first = redistribution_of(from, to, {1});
  EXPECT_EQ(redistribution_of(from, to, {1}), first);
  EXPECT_EQ(redistribution_of(MeshLayout({8, 4}, {4}, {S0}), to, {1}), first);
  EXPECT_NE(redistribution_of(from, to, {2}), first);
  EXPECT_NE(redistribution_of(to, from, {1}), first);
  EXPECT_NE(redistribution_of(from, MeshLayout({8, 4}, {4}, {S1}), {1}), first);
  EXPECT_NE(redistribution_of(MeshLayout({8, 4}, {4}, {Placement::strided_shard(0, 2)}), to, {1}), first);
  EXPECT_NE(redistribution_of(MeshLayout({8, 4}, {4}, {Placement::partial()}), to, {1}),
            redistribution_of(MeshLayout({8, 4}, {4}, {Placement::partial(ReduceOp::max)}), to, {1}));
  EXPECT_NE(redistribution_of(MeshLayout({4, 8}, {4}, {S0}), MeshLayout({4, 8}, {4}, {R}), {1}), first);
  EXPECT_NE(redistribution_of(MeshLayout({8, 4}, {2, 2}, {S0, R}), MeshLayout({8, 4}, {2, 2}, {R, R}), {0, 1}), first);
}

// Ranks that are threads plan at the same time, more than is kept.
TEST(RankRedistributionTest, ManyPlansOfManyThreads) {
  std::vector<std::thread> ranks;
  for (std::int64_t rank = 0; rank < 4; ++rank) {
    ranks.emplace_back([rank] {
      for (std::int64_t length = 512; length < 560; ++length) {
        const MeshLayout from({length, 2}, {512}, {S0}), to({length, 2}, {512}, {R});
        const auto plan = redistribution_of(from, to, {rank});
        EXPECT_EQ(plan->gets.size(), 1u);
        std::int64_t received = 0;
        for (const Move& move : plan->exchange.moves) received += move.destination_rank == rank ? volume(move.box) : 0;
        EXPECT_EQ(received, 2 * length);
      }
    });
  }
  for (std::thread& rank : ranks) rank.join();
}

}  // namespace
}  // namespace tessera
