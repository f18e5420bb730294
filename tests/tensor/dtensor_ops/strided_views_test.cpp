// Views of DTensors that change their size in place, or have strides of their own.

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "support/error_matchers.h"
#include "tensor/mesh_support.h"
#include "tessera/comm/comm_debug_mode.h"
#include "tessera/comm/local_ranks.h"
#include "tessera/tensor/dtensor_factories.h"
#include "tessera/tensor/dtensor_ops.h"

namespace tessera {
namespace {

using testing::cross;
using testing::indexed;
using testing::on_mesh;
using testing::P;
using testing::R;
using testing::S0;
using testing::S1;
using testing::Sizes;

const Placement kColumns = Placement::shard(2);

TEST(DTensorSqueezeInPlaceTest, EveryReferenceHasTheOtherSize) {
  run_local(6, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {3, 2}, {"a", "b"});
    const at::Tensor full = indexed({1, 8});
    const DTensor x = on_mesh(full, mesh, {P, S1}), alias = x;
    const at::Tensor memory = x.local_tensor().view({-1});
    EXPECT_EQ(x.local_chunks()[0].sizes.size(), 2u);
    const CommDebugMode mode(group);
    const DTensor result = dtensor::squeeze_(x, 0);
    EXPECT_EQ(mode.total(), 0);
    for (const DTensor& each : {x, alias, result}) {
      EXPECT_EQ(each.size(), Sizes{8});
      EXPECT_EQ(each.stride(), Sizes{1});
      EXPECT_EQ(each.placements(), (Placements{P, S0}));
      EXPECT_EQ(each.local_chunks()[0].sizes.size(), 1u);
      EXPECT_TRUE(each.local_tensor().is_alias_of(memory));
      EXPECT_TRUE(at::equal(each.full_tensor(), full[0]));
    }
  });
}

TEST(DTensorSqueezeInPlaceTest, GivesWhatItGivesOnTheFullTensor) {
  const at::Tensor full = indexed({1, 4, 1, 6, 1});
  for (const Sizes& shape : {Sizes{2}, Sizes{2, 2}}) {
    run_local(static_cast<int>(mesh_size(shape)), [&](const ProcessGroup& group) {
      const DeviceMesh mesh(group, shape);
      for (const Placements& placements : cross({R, S1, Placement::shard(3), P}, shape.size())) {
        const DTensor all = on_mesh(full, mesh, placements), some = on_mesh(full, mesh, placements);
        EXPECT_TRUE(at::equal(dtensor::squeeze_(all).full_tensor(), full.squeeze()));
        EXPECT_TRUE(at::equal(dtensor::squeeze_(some, {0, -1, 1}).full_tensor(), full[0].squeeze(-1)));
        EXPECT_EQ(some.size(), (Sizes{4, 1, 6}));
        EXPECT_TRUE(at::equal(dtensor::squeeze_(some, -2).full_tensor(), full.squeeze()));
        EXPECT_EQ(dtensor::squeeze_(some, 0).size(), (Sizes{4, 6})) << "a dimension that is longer stays";
        EXPECT_EQ(some.placements(), all.placements());
      }
    });
  }
  run_local(3, [](const ProcessGroup& group) {
    const DeviceMesh mesh = DeviceMesh::of_ranks(group, {2}, {0, 1});
    const DTensor one = dtensor::ones({1, 1}, mesh);
    EXPECT_EQ(dtensor::squeeze_(one).size(), Sizes());
    EXPECT_EQ(one.full_tensor().item<float>(), mesh.has_this_rank() ? 1 : 0);
    EXPECT_EQ(dtensor::sum(one * 3).to_local().dim(), 0);
  });
}

TEST(DTensorSqueezeInPlaceTest, GradientsPassThroughAndWhatDoesNotFitIsRefused) {
  run_local(2, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2});
    const DTensor leaf = distribute_tensor(indexed({1, 4}).set_requires_grad(true), mesh, {S1});
    const DTensor x = leaf * 3;
    dtensor::squeeze_(x, 0);
    dtensor::sum(x * on_mesh(indexed({4}), mesh, {S0})).full_tensor().backward();
    EXPECT_TRUE(at::equal(leaf.grad()->full_tensor(), indexed({1, 4}) * 3));
    EXPECT_ERROR(dtensor::squeeze_(leaf, 0), ErrorCode::invalid_argument, "squeeze_ of DTensor of size [1, 4]", "leaf");
    EXPECT_EQ(leaf.size(), (Sizes{1, 4}));
    const DTensor rows = on_mesh(indexed({1, 4}), mesh, {S0});
    EXPECT_ERROR(dtensor::squeeze_(rows), ErrorCode::unsupported, "squeeze_ of dimension 0",
                 "which is sharded, expected one that is not; redistribute it before");
    EXPECT_EQ(rows.size(), (Sizes{1, 4}));
    EXPECT_ERROR(dtensor::squeeze_(rows, 2), ErrorCode::invalid_argument, "dimension 2");
  });
}

TEST(DTensorAsStridedTest, TheSameStridesAreTheTensorAsItIsPlaced) {
  run_local(4, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2, 2});
    const at::Tensor full = indexed({3, 4, 6});
    for (const Placements& placements : cross({R, S0, S1, kColumns, P}, 2)) {
      const DTensor x = on_mesh(full, mesh, placements);
      const CommDebugMode mode(group);
      for (const DTensor& y : {x, dtensor::transpose(x, 0, 2)}) {
        const DTensor same = dtensor::as_strided(y, y.size(), y.stride(), y.storage_offset());
        EXPECT_EQ(same.placements(), y.placements());
        EXPECT_EQ(same.stride(), y.stride());
        EXPECT_TRUE(at::equal(same.local_tensor(), y.local_tensor()));
        EXPECT_TRUE(same.local_tensor().is_alias_of(x.local_tensor()));
      }
      EXPECT_EQ(mode.total(), 0);
    }
  });
}

TEST(DTensorAsStridedTest, OthersAreThoseOfTheFullTensor) {
  const at::Tensor leaf = indexed({3, 4}).set_requires_grad(true);
  at::as_strided(leaf, {3, 2, 2}, {4, 1, 1}, 1).square().sum().backward();
  run_local(2, [&](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2});
    for (const Placement& placement : {R, S0, S1, P}) {
      const DTensor x = on_mesh(leaf, mesh, {placement}).requires_grad_();
      const DTensor y = dtensor::as_strided(x, {3, 2, 2}, {4, 1, 1}, 1);
      EXPECT_TRUE(at::equal(y.full_tensor(), at::as_strided(leaf, {3, 2, 2}, {4, 1, 1}, 1)));
      dtensor::sum(dtensor::square(y)).full_tensor().backward();
      EXPECT_TRUE(at::allclose(x.grad()->full_tensor(), leaf.grad())) << placement;
      EXPECT_TRUE(at::equal(dtensor::as_strided(x, {2}, {5}).full_tensor(), at::as_strided(leaf, {2}, {5})));
      EXPECT_ERROR(dtensor::as_strided(dtensor::transpose(x.detach(), 0, 1), {2}, {5}), ErrorCode::unsupported,
                   "expected a contiguous one without offset");
      EXPECT_ERROR(dtensor::as_strided(x.detach(), {30}, {5}), ErrorCode::invalid_argument, "as_strided");
    }
  });
}

}  // namespace
}  // namespace tessera
