#include "tessera/layout/mesh_redistribution.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <tuple>

#include "layout/mesh_cases.h"
#include "support/chaos.h"
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
  return plan_redistribution(MeshLayout(size, mesh, from), MeshLayout(size, mesh, to), 0);
}

// Returns what all ranks get, by their own plans.
std::vector<MeshMove> moves_of_all(const MeshLayout& from, const MeshLayout& to) {
  std::vector<MeshMove> all;
  for (std::int64_t rank = 0; rank < mesh_size(from.mesh_shape()); ++rank) {
    for (MeshMove& move : plan_redistribution(from, to, rank).moves) {
      EXPECT_TRUE(move.source == rank || move.destination == rank);
      if (move.destination == rank) all.push_back(std::move(move));
    }
  }
  return all;
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
  testing::SampleIfSanitized sample(7);
  for (const auto& [size, mesh] : std::vector<std::pair<Sizes, Sizes>>{
           {{5, 3}, {3}}, {{8, 4}, {2, 2}}, {{5, 3}, {2, 3}}, {{1, 7}, {2, 3}}, {{5, 6}, {2, 1, 2}}}) {
    for (const Placements& source : cross(choices, mesh.size())) {
      for (const Placements& target : cross(choices, mesh.size())) {
        if (!sample.takes_next()) continue;
        const MeshLayout from(size, mesh, source), to(size, mesh, target);
        const MeshRedistribution plan = plan_redistribution(from, to, 0);
        ASSERT_THAT(plan.reductions, IsEmpty());
        ASSERT_THAT(plan.partial_dims, IsEmpty());
        std::vector<std::multiset<Sizes>> got(static_cast<std::size_t>(mesh_size(mesh)));
        std::vector<std::multiset<Sizes>> has(got.size());
        for (std::size_t rank = 0; rank < got.size(); ++rank)
          has[rank] = elements_of(from, static_cast<std::int64_t>(rank));
        for (const MeshMove& move : moves_of_all(from, to)) {
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

// --- the plan of a rank against the moves of all, found among the boxes of all ranks

// The plan of the moves alone, which looks for the boxes of each rank among those of all others.
MeshRedistribution plan_of_all(const MeshLayout& from, const MeshLayout& to) {
  std::vector<std::vector<LocalBox>> sources;
  for (std::int64_t rank = 0; rank < mesh_size(from.mesh_shape()); ++rank)
    sources.push_back(from.local_boxes(mesh_coordinate(from.mesh_shape(), rank)));
  return plan_redistribution(from, sources, to);
}

std::vector<MeshMove> moves_between(const MeshRedistribution& plan, std::int64_t source, std::int64_t destination) {
  std::vector<MeshMove> moves;
  for (const MeshMove& move : plan.moves) {
    if (move.source == source && move.destination == destination) moves.push_back(move);
  }
  return moves;
}

class RandomCases {
 public:
  explicit RandomCases(std::uint32_t seed) : engine_(seed) {}

  std::int64_t number(std::int64_t least, std::int64_t most) {
    return std::uniform_int_distribution<std::int64_t>(least, most)(engine_);
  }
  Sizes numbers(std::int64_t least_count, std::int64_t least, std::int64_t most) {
    Sizes numbers(static_cast<std::size_t>(number(least_count, 3)));
    for (std::int64_t& one : numbers) one = number(least, most);
    return numbers;
  }
  MeshLayout layout(const Sizes& size, const Sizes& mesh) {
    Placements placements;
    for (std::size_t m = 0; m < mesh.size(); ++m) {
      const std::int64_t dim = number(0, static_cast<std::int64_t>(size.size())), kind = number(0, 5);
      if (kind == 0) {
        placements.push_back(P);
      } else if (dim == static_cast<std::int64_t>(size.size())) {
        placements.push_back(R);
      } else {
        placements.push_back(kind == 1 ? Placement::strided_shard(dim, number(2, 3)) : Placement::shard(dim));
      }
    }
    return {size, mesh, placements};
  }

 private:
  std::mt19937 engine_;
};

RC_GTEST_PROP(MeshRedistributionTest, TheMovesOfARankAreItsPartOfThoseOfAll, (std::uint32_t seed)) {
  RandomCases random(seed);
  for (std::size_t i = 0; i < 100; i += testing::stride_if_sanitized(10)) {
    const Sizes size = random.numbers(0, 0, 9), mesh = random.numbers(1, 1, 3);
    const MeshLayout from = random.layout(size, mesh), to = random.layout(size, mesh);
    const std::int64_t a = random.number(0, mesh_size(mesh) - 1), b = random.number(0, mesh_size(mesh) - 1);
    const MeshRedistribution of_a = plan_redistribution(from, to, a), of_b = plan_redistribution(from, to, b);
    const MeshRedistribution all =
        plan_of_all(MeshLayout(size, mesh, of_a.reduced), MeshLayout(size, mesh, of_a.moved));
    RC_ASSERT(of_a.exchanged_dims == all.exchanged_dims);
    RC_ASSERT(of_a.largest_message >= all.largest_message);
    if (of_a.reductions.empty()) RC_ASSERT(of_a.sent == all.sent);
    std::vector<MeshMove> expected;
    for (const MeshMove& move : all.moves) {
      if (move.source == a || move.destination == a) expected.push_back(move);
    }
    std::sort(expected.begin(), expected.end(), [a](const MeshMove& one, const MeshMove& other) {
      const auto key = [a](const MeshMove& move) {
        return std::tuple(move.destination != a, move.source, move.destination, move.box.offsets);
      };
      return key(one) < key(other);
    });
    RC_ASSERT(of_a.moves == expected);
    RC_ASSERT(moves_between(of_a, a, b) == moves_between(of_b, a, b));
    MeshRedistribution rest = of_b;  // all but the moves is the same on all ranks
    rest.moves = of_a.moves;
    RC_ASSERT(rest == of_a);
  }
}

TEST(MeshRedistributionTest, LengthsOfMessagesAndRuns) {
  const auto expect = [](const MeshRedistribution& plan, std::int64_t message, std::int64_t run) {
    EXPECT_EQ(plan.largest_message, message);
    EXPECT_EQ(plan.run_length, run);
  };
  expect(plan_of({8, 8}, {4}, {S0}, {R}), 16, 16);  // all-gather of two rows
  expect(plan_of({8, 8}, {4}, {S1}, {R}), 16, 2);
  expect(plan_of({8, 8}, {4}, {S0}, {S1}), 4, 2);
  expect(plan_of({8, 8}, {4}, {S0}, {Placement::strided_shard(0, 2)}), 8, 8);
  EXPECT_EQ(plan_of({8, 8}, {4}, {R}, {S1}).largest_message, 0);
  EXPECT_EQ(plan_of({5, 3}, {3}, {S0}, {R}).largest_message, 6);
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

TEST(MeshRedistributionTest, BoxesOfPartialTensorsAreRefused) {
  const std::vector<std::vector<LocalBox>> boxes(2, {{Box({0}, {4}), {0}}});
  const MeshLayout full({4}, {2}, {R}), partial({4}, {2}, {P});
  EXPECT_ERROR(
      plan_redistribution(full, boxes, partial), ErrorCode::invalid_argument,
      "redistribute boxes of a tensor of shape [4] from [R] to [P(sum)]: expected no partial placement that changes");
  EXPECT_ERROR(plan_redistribution(partial, boxes, full), ErrorCode::invalid_argument, "from [P(sum)] to [R]");
}

TEST(MeshRedistributionTest, LayoutsThatDontFitAreRefused) {
  EXPECT_ERROR(
      plan_redistribution(MeshLayout({8}, {2}, {R}), MeshLayout({9}, {2}, {R}), 0), ErrorCode::invalid_argument,
      "redistribute a tensor of shape [8] on a mesh of shape [2]: the target has shape [9] on a mesh of shape [2]");
  for (const std::int64_t rank : {-1, 2}) {
    EXPECT_ERROR(plan_redistribution(MeshLayout({8}, {2}, {R}), MeshLayout({8}, {2}, {S0}), rank),
                 ErrorCode::invalid_argument, fmt::format("rank {}, expected 0 to 1", rank));
  }
}

}  // namespace
}  // namespace tessera
