#include "tessera/layout/redistribution_cost.h"

#include <gtest/gtest.h>

#include "layout/mesh_cases.h"
#include "support/error_matchers.h"
#include "tessera/layout/mesh_redistribution.h"
#include "tessera/layout/shard_order.h"

namespace tessera {
namespace {

using testing::cross;
using testing::P;
using testing::R;
using testing::S0;
using testing::S1;
using testing::Sizes;

RedistributionCost cost_of(const Sizes& size, const Sizes& mesh, const Placements& from, const Placements& to) {
  return estimated_cost(MeshLayout(size, mesh, from), MeshLayout(size, mesh, to));
}

double total_of(const Sizes& mesh, const Placements& from, const Placements& to) {
  return cost_of({8, 8}, mesh, from, to).total();
}

// The ranks divide the sizes, and strided shards express an order.
TEST(RedistributionCostTest, ItIsWhatThePlanSends) {
  const Placement strided = Placement::strided_shard(0, 2);
  struct Case {
    Sizes mesh;
    Placements choices;
  };
  for (const auto& [mesh, choices] : {Case{{1}, {R, S0, S1, P}},
                                      {{4}, {R, S0, S1, P, strided, Placement::partial(ReduceOp::max)}},
                                      {{2, 2}, {R, S0, S1, P}},
                                      {{2, 2}, {R, S0, S1, strided}},
                                      {{2, 3}, {R, S0, S1, P}},
                                      {{2, 1, 2}, {R, S0, S1, P}},
                                      {{2, 2, 2}, {R, S0, P}}}) {
    // Collectives decide for the small tensor, elements for the large one.
    for (const Sizes& size : {Sizes{72, 48}, Sizes{144 * 64, 96 * 64}}) {
      for (const Placements& from : cross(choices, mesh.size())) {
        for (const Placements& to : cross(choices, mesh.size())) {
          const bool has_order = shard_order(from, mesh) && shard_order(to, mesh);
          if (from == to || (mesh.size() > 1 && !has_order)) continue;
          const MeshLayout before(size, mesh, from), after(size, mesh, to);
          const MeshRedistribution plan = plan_redistribution(before, after, 0);
          const RedistributionCost cost = estimated_cost(before, after);
          std::int64_t collectives = plan.exchanged_dims.empty() ? 0 : 1;
          for (const MeshReduction& reduction : plan.reductions) collectives += mesh[reduction.mesh_dim] > 1 ? 1 : 0;
          ASSERT_EQ(cost.collectives, collectives) << to_string(from) << " to " << to_string(to);
          ASSERT_NEAR(cost.elements * static_cast<double>(mesh_size(mesh)), static_cast<double>(plan.sent), 0.5)
              << to_string(from) << " to " << to_string(to);
        }
      }
    }
  }
}

TEST(RedistributionCostTest, OneAllReduceCostsLessThanAReduceScatterAndAnAllGather) {
  for (const Placement& same : {R, S0, P}) EXPECT_EQ(total_of({4}, {same}, {same}), 0);
  const double all_gather = total_of({4}, {S0}, {R}), reduce_scatter = total_of({4}, {P}, {S0}),
               all_reduce = total_of({4}, {P}, {R}), all_to_all = total_of({4}, {S0}, {S1});
  EXPECT_EQ(all_gather, reduce_scatter);
  EXPECT_LT(all_reduce + 1, all_gather + reduce_scatter);
  EXPECT_GT(all_reduce, all_gather);
  EXPECT_LT(all_to_all, all_gather);
  for (const Placement& free : {S0, S1, P}) EXPECT_EQ(total_of({4}, {R}, {free}), 0) << free;
  EXPECT_EQ(total_of({4}, {S0}, {P}), 0);
  EXPECT_EQ(total_of({1}, {P}, {R}), 0);
  EXPECT_EQ(cost_of({0, 8}, {4}, {P}, {R}).total(), 0);
  const double gathers = total_of({2, 2}, {S0, S0}, {R, R}), reduces = total_of({2, 2}, {P, P}, {R, R}),
               scatters = total_of({2, 2}, {P, P}, {S0, S0});
  EXPECT_GT(reduces, gathers);
  EXPECT_GT(reduces, scatters);
}

TEST(RedistributionCostTest, MeshDimensionsAreNotIndependent) {
  // Each replicated mesh dimension can be sharded freely, but not before one that already splits the same dimension.
  EXPECT_EQ(total_of({2, 2}, {S0, R}, {S0, S0}), 0);
  EXPECT_GT(total_of({2, 2}, {R, S0}, {S0, S0}), 0);
  EXPECT_EQ(total_of({2, 2}, {R, S0}, {Placement::strided_shard(0, 2), S0}), 0);
}

TEST(RedistributionCostTest, ASmallTensorTakesFewCollectivesAndALargeOneFewElements) {
  // To a strided shard: an all-reduce, of which each rank keeps a part, or a reduce-scatter and an exchange.
  const Placement strided = Placement::strided_shard(0, 2);
  EXPECT_EQ(cost_of({8, 8}, {4}, {P}, {strided}).collectives, 1);
  EXPECT_EQ(cost_of({8000, 8000}, {4}, {P}, {strided}).collectives, 2);
  const auto plan_of = [&](const Sizes& size) {
    return plan_redistribution(MeshLayout(size, {4}, {P}), MeshLayout(size, {4}, {strided}), 0);
  };
  EXPECT_EQ(plan_of({8, 8}).reductions[0].to, R);
  EXPECT_TRUE(plan_of({8000, 8000}).reductions[0].to.is_shard());
}

TEST(RedistributionCostTest, LayoutsThatDontFitAreRefused) {
  EXPECT_ERROR(estimated_cost(MeshLayout({8}, {2}, {R}), MeshLayout({8}, {4}, {R})), ErrorCode::invalid_argument,
               "the target has shape [8] on a mesh of shape [4], expected the same");
}

}  // namespace
}  // namespace tessera
