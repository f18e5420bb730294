#include "tessera/tensor/dtensor.h"

#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "support/chaos.h"
#include "support/error_matchers.h"
#include "tensor/mesh_support.h"
#include "tessera/comm/comm_debug_mode.h"
#include "tessera/comm/local_ranks.h"
#include "tessera/layout/shard_order.h"

namespace tessera {
namespace {

using testing::cross;
using ::testing::ElementsAre;
using testing::indexed;
using testing::local_of;
using testing::P;
using testing::part_of;
using testing::R;
using testing::S0;
using testing::S1;
using testing::Sizes;

DTensor from(const at::Tensor& full, const DeviceMesh& mesh, const Placements& placements) {
  const MeshLayout layout(full.sizes().vec(), mesh.shape(), placements);
  return DTensor::from_local(local_of(full, layout, *mesh.coordinate()), mesh, placements, {full.sizes().vec()});
}

bool is_partial(const Placements& placements) {
  return std::any_of(placements.begin(), placements.end(), [](const Placement& p) { return p.is_partial(); });
}

struct Cross {
  Sizes mesh;
  std::vector<Sizes> sizes;
  Placements choices;
};

class RedistributeTest : public ::testing::TestWithParam<Cross> {};

TEST_P(RedistributeTest, EveryPlacementToEveryOther) {
  const Cross& test = GetParam();
  run_local(static_cast<int>(mesh_size(test.mesh)), [&](const ProcessGroup& group) {
    const DeviceMesh mesh(group, test.mesh);
    const std::vector<Placements> all = cross(test.choices, test.mesh.size());
    testing::SampleIfSanitized sample(11);
    for (const Sizes& size : test.sizes) {
      const at::Tensor full = indexed(size);
      for (const Placements& source : all) {
        const DTensor before = from(full, mesh, source);
        const at::Tensor kept = before.to_local().clone();
        for (const Placements& target : all) {
          if (!sample.takes_next()) continue;
          const DTensor after = before.redistribute(target);
          ASSERT_EQ(after.placements(), target);
          const bool is_as_it_was = source == target;
          const at::Tensor expected = is_as_it_was ? kept : part_of(full, after.layout(), *mesh.coordinate());
          if (is_as_it_was || !is_partial(target)) {
            ASSERT_TRUE(at::equal(after.to_local(), expected))
                << to_string(source) << " to " << to_string(target) << ": " << after.to_local() << expected;
          } else {
            const at::Tensor made = after.redistribute().to_local();
            ASSERT_TRUE(at::allclose(made, full, 1e-14)) << to_string(source) << " to " << to_string(target) << made;
          }
          ASSERT_TRUE(before.to_local().numel() == 0 ||
                      after.to_local().is_alias_of(before.to_local()) == is_as_it_was);
        }
        ASSERT_TRUE(at::equal(before.to_local(), kept)) << to_string(source);
      }
    }
  });
}

const Placements kAll = {R, S0, S1, Placement::strided_shard(0, 2), P, Placement::partial(ReduceOp::max)};
const Placements kOps = {R,
                         S0,
                         P,
                         Placement::partial(ReduceOp::average),
                         Placement::partial(ReduceOp::min),
                         Placement::partial(ReduceOp::product)};

INSTANTIATE_TEST_SUITE_P(Meshes, RedistributeTest,
                         ::testing::Values(Cross{{1}, {{3, 4}}, kAll},
                                           Cross{{2}, {{5, 6}, {8, 4}, {1, 1}, {0, 3}}, kAll},
                                           Cross{{3}, {{5, 6}, {2, 7}}, kAll}, Cross{{3}, {{5, 6}}, kOps},
                                           Cross{{8}, {{5, 6}, {16, 8}}, kAll}, Cross{{2, 2}, {{5, 6}}, kAll},
                                           Cross{{2, 3}, {{7, 6}}, {R, S0, S1, P}}, Cross{{2, 2}, {{4, 3}}, kOps},
                                           Cross{{2, 2, 2}, {{9, 5}}, {R, S0, P}}),
                         [](const ::testing::TestParamInfo<Cross>& test) {
                           return "Case" + std::to_string(test.index) + testing::mesh_name(test.param.mesh);
                         });

TEST(DTensorTest, EveryDtypeAndElementsThatDontLieInOnePiece) {
  run_local(3, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {3});
    for (const at::ScalarType type : {at::kByte, at::kShort, at::kInt, at::kLong, at::kHalf, at::kBFloat16, at::kFloat,
                                      at::kBool, at::kComplexFloat}) {
      const at::Tensor full = indexed({4, 6}).to(type);
      const DTensor rows = from(full, mesh, {S0});
      EXPECT_TRUE(at::equal(rows.full_tensor(), full)) << type;
      const DTensor columns = DTensor::from_local(rows.redistribute({S1}).to_local().t().contiguous().t(), mesh, {S1});
      EXPECT_TRUE(at::equal(columns.redistribute({S0}).to_local(), rows.to_local())) << type;
    }
    // Sums of integers are exact.
    const DTensor counts = DTensor::from_local(at::full({2}, 7, at::kLong), mesh, {R});
    EXPECT_TRUE(at::equal(counts.redistribute({P}).full_tensor(), at::full({2}, 7, at::kLong)));
  });
}

// If the gradient is declared replicated, each rank's result counts once per replica.
TEST(DTensorTest, GradientsAreThoseOfTheWhole) {
  for (const Sizes& shape : {Sizes{3}, Sizes{2, 2}}) {
    run_local(static_cast<int>(mesh_size(shape)), [&](const ProcessGroup& group) {
      const DeviceMesh mesh(group, shape);
      const Sizes size = {5, 6};
      const at::Tensor full = indexed(size), weights = indexed(size).mul(2).add(1);
      for (const Placements& source : cross({R, S0, S1, P}, shape.size())) {
        for (const Placements& target : cross({R, S0, S1, P}, shape.size())) {
          const MeshLayout layout(size, shape, source);
          const at::Tensor leaf = local_of(full, layout, *mesh.coordinate()).requires_grad_();
          const DTensor before = DTensor::from_local(leaf, mesh, source, {size});
          const DTensor after = before.redistribute(target);
          EXPECT_TRUE(after.requires_grad());
          (after.to_local() * part_of(weights, after.layout(), *mesh.coordinate())).sum().backward();
          const at::Tensor expected = part_of(weights, layout, *mesh.coordinate());
          ASSERT_TRUE(at::equal(leaf.grad(), expected)) << to_string(source) << " to " << to_string(target);
          ASSERT_TRUE(at::equal(before.grad()->to_local(), expected));
        }
      }
    });
  }
}

TEST(DTensorTest, AGradientIsPlacedAsItIsSaidToBe) {
  run_local(2, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2});
    const double r = group.rank();
    // From replicated to partial: each rank creates its own part.
    at::Tensor leaf = at::ones({4}, at::kDouble).requires_grad_();
    (DTensor::from_local(leaf, mesh, {R}).to_local({P}) * (r + 1)).sum().backward();
    EXPECT_TRUE(at::equal(leaf.grad(), at::full({4}, 3.0, at::kDouble)));
    // From shards to the full tensor: each rank has the gradient of the full tensor.
    leaf = at::ones({2}, at::kDouble).requires_grad_();
    const at::Tensor all = DTensor::from_local(leaf, mesh, {S0}).full_tensor({P});
    (all * at::arange(4, at::kDouble) * (r + 1)).sum().backward();
    EXPECT_TRUE(at::equal(leaf.grad(), at::arange(4, at::kDouble).narrow(0, group.rank() * 2, 2) * 3));
    // A partial gradient is each rank's own.
    leaf = at::ones({4}, at::kDouble).requires_grad_();
    (DTensor::from_local(leaf, mesh, {P}).to_local() * (r + 1)).sum().backward();
    EXPECT_TRUE(at::equal(leaf.grad(), at::full({4}, r + 1, at::kDouble)));
    EXPECT_ERROR(DTensor::from_local(leaf, mesh, {P}).to_local({P, P}), ErrorCode::invalid_argument,
                 "placements [P(sum), P(sum)] on a mesh of shape [2]: expected one for each");
  });
}

TEST(DTensorTest, TheFirstRanksTensorIsDistributed) {
  for (const Sizes& shape : {Sizes{1}, Sizes{4}, Sizes{2, 3}}) {
    run_local(static_cast<int>(mesh_size(shape)), [&](const ProcessGroup& group) {
      const DeviceMesh mesh(group, shape);
      for (const Placements& placements : cross({R, S0, S1, Placement::strided_shard(0, 2)}, shape.size())) {
        const at::Tensor full = indexed({5, 6});
        at::Tensor mine = group.rank() == 0 ? full.clone() : at::zeros({5, 6}, at::kDouble);
        const DTensor tensor = distribute_tensor(mine.requires_grad_(), mesh, placements);
        EXPECT_TRUE(at::equal(tensor.to_local(), part_of(full, tensor.layout(), *mesh.coordinate())));
        EXPECT_TRUE(tensor.requires_grad());
        EXPECT_TRUE(tensor.to_local().is_leaf());
        EXPECT_TRUE(at::equal(tensor.full_tensor(), full));
      }
    });
  }
}

TEST(DTensorTest, TheTensorOfTheRankGivenIsDistributed) {
  for (const Sizes& shape : {Sizes{3}, Sizes{2, 2}}) {
    run_local(static_cast<int>(mesh_size(shape)), [&](const ProcessGroup& group) {
      const DeviceMesh mesh(group, shape);
      const at::Tensor mine = indexed({5, 6}).add(100 * group.rank());
      for (const Placements& placements : cross({R, S0, S1}, shape.size())) {
        for (std::int64_t source = 0; source < shape[0]; ++source) {
          const std::int64_t rank = shape.size() == 1 ? source : 3 * source;  // the same coordinate in each dimension
          const DTensor tensor = distribute_tensor(mine.clone().requires_grad_(), mesh, placements, source);
          EXPECT_TRUE(tensor.requires_grad() && tensor.to_local().is_leaf());
          EXPECT_TRUE(at::equal(tensor.full_tensor(), indexed({5, 6}).add(100 * rank))) << to_string(placements);
        }
        // Each rank's own, without communication and as new memory.
        const CommDebugMode mode(group);
        const DTensor own = distribute_tensor(mine, mesh, placements, std::nullopt);
        EXPECT_TRUE(at::equal(own.to_local(), part_of(mine, own.layout(), *mesh.coordinate())));
        EXPECT_TRUE(own.to_local().numel() == 0 || !own.to_local().is_alias_of(mine));
        EXPECT_EQ(mode.total() + mode.comparisons(), 0);
      }
      EXPECT_ERROR(distribute_tensor(mine, mesh, {}, shape[0]), ErrorCode::invalid_argument, "expected 0 to ");
      EXPECT_ERROR(distribute_tensor(mine, mesh, {}, -1), ErrorCode::invalid_argument, "the tensor of rank -1");
      EXPECT_ERROR(distribute_tensor(mine, mesh, {}, group.rank() == 0 ? 0 : 1), ErrorCode::invalid_argument,
                   "distribute a tensor of rank");
      EXPECT_ERROR(distribute_tensor(mine.clone().requires_grad_() * 2, mesh), ErrorCode::invalid_argument,
                   "it was computed from tensors that require gradients, expected a leaf");
    });
  }
}

TEST(RedistributeTest, EveryShardOrderToEveryOther) {
  const Sizes shape = {2, 3, 2};
  run_local(12, [&](const ProcessGroup& group) {
    const DeviceMesh mesh(group, shape);
    const at::Tensor full = indexed({24, 2});
    std::vector<Placements> ordered = {{R, R, R}, {S0, R, S1}};
    Sizes mesh_dims = {0, 1, 2};
    do {
      ordered.push_back(with_shard_order(Placements{S0, S0, S0}, {{0, mesh_dims}}, shape));
    } while (std::next_permutation(mesh_dims.begin(), mesh_dims.end()));
    for (const Placements& source : ordered) {
      const DTensor before = distribute_tensor(full, mesh, source);
      for (const Placements& target : ordered) {
        const DTensor after = before.redistribute(target);
        ASSERT_TRUE(at::equal(after.to_local(), part_of(full, after.layout(), *mesh.coordinate())))
            << to_string(source) << " to " << to_string(target);
      }
    }
  });
}

TEST(DTensorTest, FromLocalTakesTheSizeOfAllAlikeOrTheOneGiven) {
  run_local(2, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2}, {"dp"});
    const DTensor alike = DTensor::from_local(at::ones({2, 3}), mesh, {Placement::shard(-1)});
    EXPECT_THAT(alike.size(), ElementsAre(2, 6));
    EXPECT_EQ(alike.placements(), Placements{S1});
    EXPECT_EQ(alike.size(-1), 6);
    EXPECT_EQ(alike.numel(), 12);
    EXPECT_EQ(alike.to_string(), "DTensor of size [2, 6] as [S(1)] on DeviceMesh(dp=2)");
    EXPECT_EQ(DTensor::from_local(at::ones({2}), mesh).placements(), Placements{R});
    const DTensor uneven = DTensor::from_local(at::ones({group.rank() == 0 ? 2 : 1}), mesh, {S0}, {Sizes{3}});
    EXPECT_TRUE(at::equal(uneven.full_tensor(), at::ones({3})));
    EXPECT_ERROR(
        DTensor::from_local(at::ones({2}), mesh, {S0}, {Sizes{7}}), ErrorCode::invalid_argument,
        "a DTensor of size [7] as [S(0)] on DeviceMesh(dp=2): this rank's local tensor has size [2], expected");
    EXPECT_ERROR(DTensor::from_local(at::ones({2}), mesh, {S1}), ErrorCode::invalid_argument, "placement S(1)");
    EXPECT_ERROR(DTensor::from_local(at::ones({2}), mesh, {S0, R}), ErrorCode::invalid_argument, "for each of its 1");
    const at::Tensor sparse = at::ones({2, 3}).to_sparse();
    EXPECT_ERROR(DTensor::from_local(sparse, mesh, {S0}), ErrorCode::invalid_argument,
                 "DTensor from a local tensor: its layout is Sparse, expected Strided");
    EXPECT_ERROR(distribute_tensor(sparse, mesh, {S0}), ErrorCode::invalid_argument, "its layout is Sparse");
    EXPECT_ERROR(DTensor::from_local(at::ones({2}, at::kLong), mesh).requires_grad_(), ErrorCode::invalid_argument,
                 "requires_grad_ of a DTensor of size [2] of Long: expected a floating-point or complex dtype");
    EXPECT_ERROR(alike.size(2), ErrorCode::invalid_argument, "dimension 2 of DTensor of size [2, 6]");
    EXPECT_ERROR(distribute_tensor(at::ones({2}), mesh, {P}), ErrorCode::invalid_argument,
                 "distribute a tensor as [P(sum)]: expected no partial placement");
  });
}

TEST(DTensorTest, WhatRanksDontAgreeOnIsToldToAll) {
  run_local(3, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {3});
    const FromLocalOptions checks{std::nullopt, true};
    EXPECT_ERROR(DTensor::from_local(at::ones({group.rank() == 2 ? 3 : 2}), mesh, {S0}, checks),
                 ErrorCode::invalid_argument,
                 "rank 0 has size [6] and rank 2 has size [9], expected the same on all ranks");
    EXPECT_ERROR(DTensor::from_local(at::ones({2}), mesh, {group.rank() == 1 ? S0 : R}, checks),
                 ErrorCode::invalid_argument, "rank 0 has size [2] and rank 1 has size [6]");
    EXPECT_ERROR(distribute_tensor(at::ones({group.rank() == 2 ? 3 : 2}), mesh, {S0}), ErrorCode::invalid_argument,
                 "rank 0 has size [2] and rank 2 has size [3]");
    // Ranks that ask for different placements do not wait for each other.
    const DTensor sharded = distribute_tensor(at::arange(6), mesh, {S0});
    EXPECT_ERROR(sharded.redistribute({group.rank() == 1 ? S0 : R}), ErrorCode::invalid_argument,
                 "rank 0 has placements [R] and rank 1 has placements [S(0)]");
    EXPECT_TRUE(sharded.full_tensor().equal(at::arange(6)));
    EXPECT_ERROR(distribute_tensor(at::ones({2}), mesh, {group.rank() == 1 ? P : R}), ErrorCode::invalid_argument,
                 "rank 1");
    at::Tensor mine = at::full({2}, group.rank(), at::kDouble).requires_grad_();
    const DTensor same = DTensor::from_local(mine, mesh, {R}, checks);
    EXPECT_TRUE(at::equal(same.to_local(), at::zeros({2}, at::kDouble)));
    same.to_local().sum().backward();
    EXPECT_TRUE(at::equal(mine.grad(), at::ones({2}, at::kDouble)));
  });
}

TEST(DTensorTest, LocalShardsGoWhereverTheyShall) {
  run_local(4, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2, 2});
    const at::Tensor full = indexed({6, 4});
    // Rows are assigned round-robin to the ranks along the second dimension, the last rows by columns.
    std::vector<at::Tensor> shards;
    std::vector<Sizes> offsets;
    const std::int64_t r = mesh.local_rank(1);
    for (const std::int64_t row : {r, r + 2}) {
      shards.push_back(full.narrow(0, row, 1).clone());
      offsets.push_back({row, 0});
    }
    shards.push_back(full.narrow(0, 4, 2).narrow(1, 2 * r, 2).clone());
    offsets.push_back({4, 2 * r});
    const DTensor tensor = DTensor::from_local(LocalShardsWrapper(shards, offsets), mesh, {R, S0}, {6, 4});
    EXPECT_THAT(tensor.local_chunks(), ::testing::SizeIs(3));
    const Placement product = Placement::partial(ReduceOp::product), max = Placement::partial(ReduceOp::max);
    for (const Placements& target : cross({R, S0, S1, P, product, max}, 2)) {
      if (target == tensor.placements()) continue;
      const DTensor after = tensor.redistribute(target);
      ASSERT_TRUE(at::equal(after.full_tensor(), full)) << to_string(target);
      if (target[0].is_partial() || target[1].is_partial()) continue;
      ASSERT_TRUE(at::equal(after.to_local(), part_of(full, after.layout(), *mesh.coordinate()))) << to_string(target);
    }
    EXPECT_TRUE(at::equal(tensor.full_tensor(), full));
    const LocalShardsWrapper halves({full.narrow(0, 0, 3), full.narrow(0, 3, 3)}, {{0, 0}, {3, 0}});
    EXPECT_TRUE(at::equal(DTensor::from_local(halves, mesh, {R, R}, {6, 4}).full_tensor(), full));
    const DTensor none = DTensor::from_local(LocalShardsWrapper({}, {}), mesh, {R, S0}, {0, 4}, at::kDouble);
    EXPECT_EQ(none.redistribute().to_local().scalar_type(), at::kDouble);
    EXPECT_ERROR(tensor.to_local(), ErrorCode::unsupported, "is not supported for LocalShardsWrapper");
    EXPECT_EQ(tensor.local_shards()->local_shards().size(), 3u);
  });
}

TEST(DTensorTest, LocalShardsWithHolesOrOutsideAreRefusedByAll) {
  run_local(2, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2});
    const auto of = [&](std::vector<at::Tensor> shards, std::vector<Sizes> offsets) {
      return DTensor::from_local(LocalShardsWrapper(std::move(shards), std::move(offsets)), mesh, {S0}, {4, 2});
    };
    const DTensor none = of({}, {});
    const auto rows = [&](std::int64_t begin) { return of({at::ones({2, 2})}, {{begin, 0}}); };
    EXPECT_ERROR((group.rank() == 0 ? rows(0) : none).redistribute(), ErrorCode::invalid_argument,
                 "as [S(0)] on a mesh of shape [2]: no rank has [2, 4)x[0, 2)");
    EXPECT_ERROR(rows(group.rank()).redistribute(), ErrorCode::invalid_argument,
                 "rank 0 has [0, 2)x[0, 2) and rank 1 has [1, 3)x[0, 2)");
    EXPECT_ERROR(rows(3), ErrorCode::invalid_argument, "local shard [3, 5)x[0, 2) of a DTensor of size [4, 2]");
    // All shards on one rank.
    const DTensor one = group.rank() == 1 ? of({indexed({4, 2})}, {{0, 0}}) : none;
    EXPECT_TRUE(at::equal(one.full_tensor(), indexed({4, 2})));
  });
}

TEST(DTensorTest, RanksOutsideOfTheMeshHaveNothingAndDontCommunicate) {
  run_local(3, [](const ProcessGroup& group) {
    const DeviceMesh mesh = DeviceMesh::of_ranks(group, {2}, {2, 0});
    const DTensor tensor = distribute_tensor(indexed({4}), mesh, {S0});
    const DTensor full = tensor.redistribute();
    if (group.rank() == 1) {
      EXPECT_EQ(tensor.to_local().numel(), 0);
      EXPECT_EQ(full.to_local().numel(), 0);
      EXPECT_TRUE(tensor.local_chunks().empty());
      return;
    }
    EXPECT_TRUE(at::equal(tensor.to_local(), indexed({4}).narrow(0, group.rank() == 2 ? 0 : 2, 2)));
    EXPECT_TRUE(at::equal(full.to_local(), indexed({4})));
  });
}

TEST(DTensorTest, APartialOneHasNoState) {
  run_local(2, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2});
    EXPECT_ERROR(DTensor::from_local(at::ones({2}), mesh, {P}).checkpointable(), ErrorCode::invalid_argument,
                 "expected no partial placement, redistribute the tensor first");
    const auto state = DTensor::from_local(at::ones({2}), mesh, {S0}).checkpointable();
    EXPECT_THAT(state->local_chunks(), ElementsAre(Box({2 * group.rank()}, {2})));
  });
}

}  // namespace
}  // namespace tessera
