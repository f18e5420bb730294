#include "tessera/layout/mesh_redistribution.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <set>

#include "layout/mesh_cases.h"
#include "support/error_matchers.h"

namespace tessera {
namespace {

using testing::cross;
using testing::each_index;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using testing::P;
using testing::R;
using testing::S0;
using testing::S1;
using testing::Sizes;

MeshRedistribution plan_of(const Sizes& size, const Sizes& mesh, const Placements& from, const Placements& to) {
  return plan_redistribution(MeshLayout(size, mesh, from), MeshLayout(size, mesh, to));
}

std::multiset<Sizes> elements_of(const MeshLayout& layout, std::int64_t rank) {
  std::multiset<Sizes> elements;
  for (const LocalBox& local : layout.local_boxes(mesh_coordinate(layout.mesh_shape(), rank))) {
    each_index(local.box, [&](const Sizes& index) { elements.insert(index); });
  }
  return elements;
}

TEST(MeshRedistributionTest, EachRankGetsWhatItShallHaveOnceFromOneThatHasIt) {
  const std::vector<Placement> choices = {R, S0, S1, Placement::strided_shard(0, 2)};
  for (const auto& [size, mesh] : std::vector<std::pair<Sizes, Sizes>>{
           {{5, 3}, {3}}, {{8, 4}, {2, 2}}, {{5, 3}, {2, 3}}, {{1, 7}, {2, 3}}, {{5, 6}, {2, 1, 2}}}) {
    for (const Placements& source : cross(choices, mesh.size())) {
      for (const Placements& target : cross(choices, mesh.size())) {
        const MeshLayout from(size, mesh, source), to(size, mesh, target);
        const MeshRedistribution plan = plan_redistribution(from, to);
        ASSERT_THAT(plan.reductions, IsEmpty());
        ASSERT_THAT(plan.partial_dims, IsEmpty());
        std::vector<std::multiset<Sizes>> got(static_cast<std::size_t>(mesh_size(mesh)));
        std::vector<std::multiset<Sizes>> has(got.size());
        for (std::size_t rank = 0; rank < got.size(); ++rank)
          has[rank] = elements_of(from, static_cast<std::int64_t>(rank));
        for (const MeshMove& move : plan.moves) {
          each_index(move.box, [&](const Sizes& index) {
            ASSERT_EQ(has[static_cast<std::size_t>(move.source)].count(index), 1u);
            // A rank takes the elements that it has from itself.
            if (move.source != move.destination) {
              ASSERT_EQ(has[static_cast<std::size_t>(move.destination)].count(index), 0u);
            }
            got[static_cast<std::size_t>(move.destination)].insert(index);
          });
        }
        for (std::size_t rank = 0; rank < got.size(); ++rank) {
          ASSERT_EQ(got[rank], elements_of(to, static_cast<std::int64_t>(rank)))
              << to_string(source) << " to " << to_string(target) << " on rank " << rank;
        }
        if (source == target) {
          ASSERT_THAT(plan.exchanged_dims, IsEmpty());
        }
      }
    }
  }
}

TEST(MeshRedistributionTest, OnlyMeshDimensionsWhoseRanksLackSomethingCommunicate) {
  EXPECT_THAT(plan_of({8, 8}, {2, 2}, {R, R}, {S0, S1}).exchanged_dims, IsEmpty());
  EXPECT_THAT(plan_of({8, 8}, {2, 2}, {S0, S1}, {S0, R}).exchanged_dims, ElementsAre(1));
  EXPECT_THAT(plan_of({8, 8}, {2, 2}, {S0, S1}, {R, S1}).exchanged_dims, ElementsAre(0));
  EXPECT_THAT(plan_of({8, 8}, {2, 2}, {S0, S0}, {S0, R}).exchanged_dims, ElementsAre(1));
  // The second dimension's ranks get other parts than before.
  EXPECT_THAT(plan_of({8, 8}, {2, 2}, {S0, S0}, {R, S0}).exchanged_dims, ElementsAre(0, 1));
  EXPECT_THAT(plan_of({8, 8}, {2, 2}, {Placement::strided_shard(0, 2), S0}, {R, S0}).exchanged_dims, ElementsAre(0));
}

TEST(MeshRedistributionTest, PartialsAreReducedTheCheapestWay) {
  const auto reductions = [](const MeshRedistribution& plan) { return plan.reductions; };
  EXPECT_THAT(reductions(plan_of({8, 8}, {2}, {P}, {R})), ElementsAre(MeshReduction{0, R}));
  EXPECT_THAT(reductions(plan_of({8, 8}, {2}, {P}, {S1})), ElementsAre(MeshReduction{0, S1}));
  EXPECT_THAT(plan_of({8, 8}, {2}, {P}, {S1}).exchanged_dims, IsEmpty());
  EXPECT_THAT(reductions(plan_of({8, 8}, {2, 2}, {P, P}, {S0, R})),
              ElementsAre(MeshReduction{0, S0}, MeshReduction{1, R}));
  EXPECT_THAT(reductions(plan_of({8, 8}, {2, 2}, {P, P}, {S0, S0})),
              ElementsAre(MeshReduction{0, S0}, MeshReduction{1, S0}));
  // A rank that needs half does not get all elements first: its part of its local tensor is reduced, then moved.
  const MeshRedistribution misaligned = plan_of({8, 8}, {4, 2}, {P, S0}, {S0, R});
  EXPECT_THAT(misaligned.reductions, ElementsAre(MeshReduction{0, S1}));
  EXPECT_FALSE(misaligned.exchanged_dims.empty());
  EXPECT_THAT(reductions(plan_of({8, 8}, {2}, {P}, {P})), IsEmpty());
  EXPECT_THAT(reductions(plan_of({8, 8}, {2}, {P}, {Placement::partial(ReduceOp::max)})),
              ElementsAre(MeshReduction{0, R}));
}

TEST(MeshRedistributionTest, PartialsAreMadeWithoutCommunication) {
  const MeshRedistribution replicated = plan_of({8, 8}, {2}, {R}, {P});
  EXPECT_THAT(replicated.exchanged_dims, IsEmpty());
  EXPECT_THAT(replicated.partial_dims, ElementsAre(0));
  EXPECT_THAT(replicated.moved, ElementsAre(R));
  const MeshRedistribution sharded = plan_of({8, 8}, {2, 2}, {S0, S1}, {P, R});
  EXPECT_THAT(sharded.exchanged_dims, ElementsAre(1));
  EXPECT_THAT(sharded.partial_dims, ElementsAre(0));
  EXPECT_THAT(sharded.moved, ElementsAre(S0, R));
  EXPECT_THAT(plan_of({8, 8}, {2, 2}, {S0, S0}, {P, P}).exchanged_dims, IsEmpty());
  EXPECT_THAT(plan_of({8, 8}, {2, 2}, {S0, S0}, {P, P}).partial_dims, ElementsAre(1, 0));
}

TEST(MeshRedistributionTest, TheCostIsWhatAllRanksSend) {
  const auto cost = [](const Sizes& size, const Sizes& mesh, const Placements& from, const Placements& to) {
    return redistribution_cost(MeshLayout(size, mesh, from), MeshLayout(size, mesh, to));
  };
  const Placement max = Placement::partial(ReduceOp::max), strided = Placement::strided_shard(0, 2);
  for (const Placement& same : {R, S0, S1, P, strided}) EXPECT_EQ(cost({8, 8}, {4}, {same}, {same}), 0) << same;
  for (const Placement& local : {S0, S1, P, max}) EXPECT_EQ(cost({8, 8}, {4}, {R}, {local}), 0) << local;
  EXPECT_EQ(cost({8, 8}, {4}, {S0}, {R}), 3 * 64);       // all-gather
  EXPECT_EQ(cost({8, 8}, {4}, {S0}, {S1}), 3 * 64 / 4);  // all-to-all
  EXPECT_EQ(cost({8, 8}, {4}, {P}, {S0}), 3 * 64);       // reduce-scatter
  EXPECT_EQ(cost({8, 8}, {4}, {P}, {R}), 2 * 3 * 64);    // all-reduce
  EXPECT_EQ(cost({8, 8}, {4}, {strided}, {R}), cost({8, 8}, {4}, {S0}, {R}));
  EXPECT_EQ(cost({8, 8}, {4}, {P}, {max}), cost({8, 8}, {4}, {P}, {R}));
  EXPECT_EQ(cost({5, 2}, {4}, {S0}, {R}), 3 * 10);
  // On two dimensions, by the ranks along those that change. Mesh dimensions that split in another order cost an
  // exchange.
  EXPECT_EQ(cost({8, 8}, {2, 4}, {R, S0}, {R, R}), 2 * 3 * 64);
  EXPECT_EQ(cost({8, 8}, {2, 4}, {S0, S1}, {S0, R}), 3 * 64);
  EXPECT_EQ(cost({8, 8}, {2, 2}, {S0, S0}, {strided, S0}), 64 / 2);
  EXPECT_GT(cost({8, 8}, {2, 2}, {P, P}, {R, R}), cost({8, 8}, {2, 2}, {P, P}, {S0, S0}));
}

TEST(MeshRedistributionTest, BoxesThatDontMakeTheTensorAreRefused) {
  const MeshLayout from({4}, {2, 2}, {R, S0}), to({4}, {2, 2}, {R, R});
  const auto plan = [&](const std::vector<std::pair<std::int64_t, std::int64_t>>& intervals) {
    std::vector<std::vector<LocalBox>> boxes;
    for (const auto& [begin, size] : intervals) boxes.push_back({{Box({begin}, {size}), {0}}});
    return plan_redistribution(from, boxes, to);
  };
  EXPECT_EQ(plan({{0, 1}, {1, 3}, {2, 2}, {0, 2}}).moves.size(), 8u);
  EXPECT_ERROR(
      plan({{0, 1}, {1, 3}, {2, 2}, {1, 2}}), ErrorCode::invalid_argument,
      "boxes of a tensor of shape [4] as [R, S(0)] on a mesh of shape [2, 2]: rank 2 has [2, 4) and rank 3 has [1, 3)");
  EXPECT_ERROR(plan({{0, 1}, {1, 2}, {2, 2}, {0, 2}}), ErrorCode::invalid_argument, "no rank has [3, 4)");
}

TEST(MeshRedistributionTest, LayoutsThatDontFitAreRefused) {
  EXPECT_ERROR(
      plan_redistribution(MeshLayout({8}, {2}, {R}), MeshLayout({9}, {2}, {R})), ErrorCode::invalid_argument,
      "redistribute a tensor of shape [8] on a mesh of shape [2]: the target has shape [9] on a mesh of shape [2]");
}

}  // namespace
}  // namespace tessera
