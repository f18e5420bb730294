// Sizes of full tensors from local ones, and which inputs of an op get gradients.

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "support/error_matchers.h"
#include "tensor/mesh_support.h"
#include "tessera/comm/local_ranks.h"
#include "tessera/tensor/dtensor_ops.h"

namespace tessera {
namespace {

using testing::indexed;
using testing::P;
using testing::R;
using testing::S0;
using testing::S1;
using testing::Sizes;

TEST(GlobalShapeTest, LengthsAddUpAlongMeshDimensionsThatShard) {
  run_local(4, [](const ProcessGroup& group) {
    const DeviceMesh line(group, {4}), mesh(group, {2, 2});
    const std::int64_t rank = group.rank(), row = rank / 2, column = rank % 2;
    EXPECT_EQ(compute_global_tensor_shape({5, rank}, line, {S1}), (Sizes{5, 6}));
    EXPECT_EQ(compute_global_tensor_shape({rank, 5}, line, {Placement::shard(-2)}), (Sizes{6, 5}));
    EXPECT_EQ(compute_global_tensor_shape({5, 5}, line, {R}), (Sizes{5, 5}));
    EXPECT_EQ(compute_global_tensor_shape({}, line, {P}), Sizes{});
    EXPECT_EQ(compute_global_tensor_shape({row + 1, column * 7}, mesh, {S0, S1}), (Sizes{3, 7}));
    EXPECT_EQ(compute_global_tensor_shape({rank}, mesh, {S0, S0}), Sizes{6});
    EXPECT_EQ(compute_global_tensor_shape({row, 2}, mesh, {S0, P}), (Sizes{1, 2}));
    // A size that a DTensor can have is the one that it has.
    const DTensor uneven = distribute_tensor(indexed({7, 3}), mesh, {Placement::strided_shard(0, 2), S0});
    EXPECT_EQ(compute_global_tensor_shape(uneven.local_tensor().sizes().vec(), mesh, uneven.placements()),
              uneven.size());
    EXPECT_ERROR(compute_global_tensor_shape({5 + rank % 2, rank}, line, {S1}), ErrorCode::invalid_argument,
                 "lengths 5 and 6 of dimension 0 along mesh dimension 0, expected equal ones where it is not sharded");
    EXPECT_ERROR(compute_global_tensor_shape({2, 2}, mesh, {S0}), ErrorCode::invalid_argument, "placement");
    EXPECT_ERROR(compute_global_tensor_shape({2, rank}, line, {rank == 3 ? S0 : S1}), ErrorCode::invalid_argument,
                 "placements [S(1)]", "placements [S(0)]");
  });
}

TEST(DTensorGradientTest, OnlyInputsThatRequireGradGetOne) {
  const at::Tensor full = at::sin(indexed({6, 4})), weight = at::cos(indexed({4})), bias = at::sin(indexed({4}) * 2);
  const at::Tensor weights = at::cos(indexed({6, 4}));
  run_local(2, [&](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2});
    for (const Placement& placement : {R, S0, S1, P}) {
      for (int which = 1; which < 8; ++which) {
        std::vector<at::Tensor> leaves = {full.clone(), weight.clone(), bias.clone()};
        std::vector<DTensor> inputs;
        for (std::size_t i = 0; i < 3; ++i) {
          const Placement of_input = i == 0 ? placement : placement == S1 ? S0 : R;
          const MeshLayout layout(leaves[i].sizes().vec(), {2}, {of_input});
          inputs.push_back(DTensor::from_local(testing::local_of(leaves[i], layout, *mesh.coordinate()), mesh,
                                               {of_input}, {layout.size()}));
          const bool requires_grad = (which >> i) % 2 != 0;
          leaves[i].set_requires_grad(requires_grad);
          inputs[i].requires_grad_(requires_grad);
        }
        (at::layer_norm(leaves[0], {4}, leaves[1], leaves[2]) * weights).sum().backward();
        dtensor::sum(dtensor::layer_norm(inputs[0], {4}, inputs[1], inputs[2]) * weights).full_tensor().backward();
        for (std::size_t i = 0; i < 3; ++i) {
          EXPECT_EQ(inputs[i].grad().has_value(), leaves[i].requires_grad());
          if (inputs[i].grad()) {
            EXPECT_TRUE(at::allclose(inputs[i].grad()->full_tensor(), leaves[i].grad()))
                << placement << which << ' ' << i;
          }
        }
      }
    }
  });
}

}  // namespace
}  // namespace tessera
