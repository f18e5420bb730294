// Ranks outside of a mesh call the same functions and do nothing in them.

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tensor/mesh_support.h"
#include "tessera/comm/comm_debug_mode.h"
#include "tessera/comm/local_ranks.h"
#include "tessera/tensor/dtensor.h"
#include "tessera/tensor/dtensor_factories.h"
#include "tessera/tensor/dtensor_ops.h"

namespace tessera {
namespace {

using testing::indexed;
using testing::R;
using testing::S0;
using testing::S1;
using testing::Sizes;

TEST(SubMeshTest, RanksOutsideOfTheMeshTakePartInNothing) {
  for (const Sizes& shape : {Sizes{2}, Sizes{1, 2}}) {
    run_local(3, [&](const ProcessGroup& group) {
      const DeviceMesh mesh = DeviceMesh::of_ranks(group, shape, {2, 0});
      const bool is_in = mesh.has_this_rank();
      Placements rows(shape.size(), R), columns(shape.size(), R);
      rows.back() = S0;
      columns.back() = S1;
      const at::Tensor full = indexed({4, 6});
      const CommDebugMode mode(group);
      const DTensor x = distribute_tensor(full.clone().requires_grad_(), mesh, rows),
                    y = x.redistribute(columns).detach();
      const auto expect_full = [&](const DTensor& found, const at::Tensor& expected) {
        EXPECT_EQ(found.size(), expected.sizes().vec());
        const at::Tensor unsharded = found.full_tensor();
        if (is_in) {
          EXPECT_TRUE(at::equal(unsharded, expected));
        } else if (expected.dim() == 0) {
          EXPECT_TRUE(unsharded.dim() == 0 && unsharded.item<double>() == 0);
        } else {
          EXPECT_EQ(unsharded.numel(), 0);
        }
      };
      // Ops of each kind.
      expect_full(x + y, full * 2);
      expect_full(dtensor::relu(x), full);
      expect_full(dtensor::sum(x), full.sum());
      expect_full(dtensor::sum(x, {0}), full.sum(0));
      expect_full(dtensor::expand(dtensor::sum(x), {2}), full.sum().expand({2}));
      expect_full(dtensor::max(dtensor::view(x, {24}), 0).values, full.max());
      for (const DTensor& part : dtensor::split(x, 3, 1)) {
        EXPECT_EQ(part.to_local().sizes(), is_in ? Sizes({2, 3}) : Sizes({0}));
      }
      expect_full(dtensor::linear(x, y), at::linear(full, full));
      expect_full(dtensor::view(x, {24}), full.view({24}));
      expect_full(dtensor::cat({x, y}, 1), at::cat({full, full}, 1));
      expect_full(dtensor::max(x, 0).indices, full.argmax(0));
      // In place.
      const DTensor z = dtensor::clone(y);
      expect_full(dtensor::add_(z, x.detach()), full * 2);
      expect_full(dtensor::mul_(z, 3), full * 6);
      expect_full(dtensor::fill_(z, 2), at::full({4, 6}, 2.0, at::kDouble));
      // The result of a comparison is true where there is nothing to compare.
      EXPECT_TRUE(dtensor::equal(x, y));
      EXPECT_EQ(dtensor::equal(x, z), !is_in);
      // Factories.
      PhiloxGenerator generator(3);
      expect_full(dtensor::zeros({4, 6}, mesh, rows, at::kDouble), at::zeros({4, 6}, at::kDouble));
      expect_full(dtensor::ones_like(x), at::ones({4, 6}, at::kDouble));
      EXPECT_EQ(dtensor::rand({4, 6}, mesh, generator, rows).to_local().numel(), is_in ? 12 : 0);
      EXPECT_EQ(generator.offset, 12u);  // the same on all ranks
      EXPECT_EQ(dtensor::dropout(x, 0.5, generator).to_local().numel(), is_in ? 12 : 0);
      dtensor::sum(x * y).redistribute().to_local().backward();  // on every rank
      if (is_in) {
        EXPECT_TRUE(at::equal(x.grad()->full_tensor(), full));
      } else {
        EXPECT_EQ(mode.total(), 0);
        EXPECT_EQ(mode.comparisons(), 0);
      }
    });
  }
}

}  // namespace
}  // namespace tessera
