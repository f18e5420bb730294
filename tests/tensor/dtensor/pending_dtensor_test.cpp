#include "tessera/tensor/dtensor/pending_dtensor.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "support/error_matchers.h"
#include "tensor/mesh_support.h"
#include "tessera/comm/comm_debug_mode.h"
#include "tessera/comm/local_ranks.h"
#include "tessera/tensor/dtensor_ops.h"

namespace tessera {
namespace {

using testing::cross;
using testing::indexed;
using testing::on_mesh;
using testing::P;
using testing::part_of;
using testing::R;
using testing::S0;
using testing::S1;
using testing::Sizes;

TEST(PendingDTensorTest, EveryPlacementToEveryOtherGivesTheSame) {
  const Placement max = Placement::partial(ReduceOp::max), average = Placement::partial(ReduceOp::average);
  for (const Sizes& shape : {Sizes{1}, Sizes{3}, Sizes{2, 2}}) {
    run_local(static_cast<int>(mesh_size(shape)), [&](const ProcessGroup& group) {
      const DeviceMesh mesh(group, shape);
      const at::Tensor full = indexed({5, 4}).mul(12);
      std::vector<Placements> choices = cross({R, S0, S1, P}, shape.size());
      if (shape.size() == 2) {
        choices.push_back({Placement::strided_shard(0, 2), S0});
        choices.push_back({max, max});
        choices.push_back({average, P});
      }
      for (const Placements& from : choices) {
        for (const Placements& to : choices) {
          const DTensor x = on_mesh(full, mesh, from);
          const PendingDTensor pending = start_redistribute(x, to);
          EXPECT_EQ(pending.layout().placements(), to);
          const DTensor result = pending.wait();
          EXPECT_TRUE(pending.is_complete());
          EXPECT_TRUE(pending.wait().local_tensor().is_same(result.local_tensor()));
          ASSERT_EQ(result.placements(), to);
          ASSERT_TRUE(at::allclose(result.full_tensor(), full)) << to_string(from) << " to " << to_string(to);
          ASSERT_TRUE(from == to || !result.local_tensor().is_alias_of(x.local_tensor()));
        }
      }
    });
  }
}

TEST(PendingDTensorTest, ReturnsBeforeTheOtherRanksSend) {
  run_local(2, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2});
    const at::Tensor full = indexed({4, 2});
    for (const auto& [from, to] : std::vector<std::pair<Placement, Placement>>{{S0, R}, {P, R}, {P, S1}, {S1, S0}}) {
      const DTensor x = on_mesh(full, mesh, {from});
      const CommDebugMode mode(group);
      const PendingDTensor first = start_redistribute(x, {to}), second = start_redistribute(x * 2, {to});
      EXPECT_FALSE(first.is_complete() || second.is_complete());
      EXPECT_EQ(mode.total(), 2) << "one collective each has started";
      // Others run in between, and the results may be taken in any order.
      group.barrier();
      const at::Tensor sum = at::ones({3});
      group.all_reduce(sum);
      EXPECT_TRUE(at::equal(sum, at::full({3}, 2.0)));
      EXPECT_TRUE(at::equal(second.wait().full_tensor(), full * 2));
      EXPECT_TRUE(at::equal(first.wait().full_tensor(), full));
    }
    const DTensor same = on_mesh(full, mesh, {S0});
    EXPECT_TRUE(start_redistribute(same, {S0}).is_complete());
    start_redistribute(same);  // never waited for
  });
}

// Only the last of several collectives is left for the wait.
TEST(PendingDTensorTest, WhatTheLastCollectiveNeedsIsSentBefore) {
  run_local(4, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2, 2});
    const DTensor x = on_mesh(indexed({4, 4}), mesh, {P, S0});
    const CommDebugMode mode(group);
    const PendingDTensor pending = start_redistribute(x);
    const std::int64_t started = mode.total();
    EXPECT_GT(started, 1);
    EXPECT_FALSE(pending.is_complete());
    EXPECT_TRUE(at::equal(pending.wait().to_local(), indexed({4, 4})));
    EXPECT_EQ(mode.total(), started);
  });
}

TEST(PendingDTensorTest, GradientsAreThoseOfRedistribute) {
  run_local(3, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {3});
    const at::Tensor full = indexed({5, 4}), weights = indexed({5, 4}).add(2);
    for (const Placement& from : {R, S0, S1}) {
      for (const Placement& to : {R, S0, S1}) {
        const at::Tensor leaf = part_of(full, MeshLayout({5, 4}, {3}, {from}), *mesh.coordinate()).requires_grad_();
        const DTensor x = DTensor::from_local(leaf, mesh, {from}, {Sizes{5, 4}});
        const DTensor y = start_redistribute(dtensor::mul(x, 3), {to}).wait();
        EXPECT_TRUE(y.requires_grad());
        y.to_local().backward(part_of(weights, y.layout(), *mesh.coordinate()));
        EXPECT_TRUE(at::equal(leaf.grad(), 3 * part_of(weights, x.layout(), *mesh.coordinate())));
      }
    }
  });
}

TEST(PendingDTensorTest, WhatDoesNotFitIsRefusedOnAllRanksAndOutsideNothingIsSent) {
  run_local(3, [](const ProcessGroup& group) {
    const DeviceMesh mesh = DeviceMesh::of_ranks(group, {2}, {0, 2});
    const bool is_in = mesh.has_this_rank();
    const DTensor x = distribute_tensor(indexed({4, 2}), mesh, {S0});
    const CommDebugMode mode(group);
    EXPECT_EQ(start_redistribute(x).wait().to_local().numel(), is_in ? 8 : 0);
    EXPECT_EQ(mode.total(), is_in ? 1 : 0);
    if (!is_in) return;
    EXPECT_ERROR(start_redistribute(x, {group.rank() == 0 ? S1 : R}), ErrorCode::invalid_argument, "start_redistribute",
                 "expected the same on all ranks");
    EXPECT_ERROR(start_redistribute(x, {Placement::shard(2)}), ErrorCode::invalid_argument, "dimension");
    const LocalShardsWrapper none({}, {});
    EXPECT_ERROR(start_redistribute(DTensor::from_local(none, mesh, {S0}, {0})), ErrorCode::unsupported,
                 "LocalShardsWrapper");
    EXPECT_TRUE(at::equal(start_redistribute(x).wait().to_local(), indexed({4, 2})));
  });
}

}  // namespace
}  // namespace tessera
