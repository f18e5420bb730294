#include "tessera/tensor/dtensor/local_map.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "support/error_matchers.h"
#include "tensor/mesh_support.h"
#include "tessera/comm/comm_debug_mode.h"
#include "tessera/comm/functional.h"
#include "tessera/comm/local_ranks.h"

namespace tessera {
namespace {

using testing::indexed;
using testing::P;
using testing::R;
using testing::S0;
using testing::S1;

using Locals = std::vector<at::Tensor>;

Locals product_of(const Locals& locals) { return {at::matmul(locals[0], locals[1])}; }

TEST(LocalMapTest, AFunctionOfLocalTensorsMakesDTensors) {
  run_local(2, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2});
    const at::Tensor w = indexed({4, 6}), x = indexed({6, 2});
    const DTensor columns = distribute_tensor(w, mesh, {S1}), rows = distribute_tensor(x, mesh, {S0});
    LocalMapOptions options;
    options.in_placements = {{S1}, {S0}};
    options.out_placements = {{P}};
    const std::vector<DTensor> inputs = {columns, rows};
    const CommDebugMode mode(group);
    const DTensor partial = local_map(product_of, inputs, options)[0];
    EXPECT_EQ(mode.total(), 0);
    EXPECT_EQ(partial.placements(), Placements{P});
    EXPECT_TRUE(at::equal(partial.full_tensor(), at::matmul(w, x)));
    // With a collective of the function's own, and several results.
    options.out_placements = {{R}, {S1}};
    const std::vector<DTensor> several = local_map(
        [&](const Locals& locals) {
          return Locals{functional::all_reduce(group, product_of(locals)[0]), locals[0] * 2};
        },
        inputs, options);
    EXPECT_TRUE(at::equal(several[0].to_local(), at::matmul(w, x)));
    EXPECT_TRUE(at::equal(several[1].full_tensor(), w * 2));
  });
}

TEST(LocalMapTest, InputsAreRedistributedOnlyIfAsked) {
  run_local(2, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2});
    const at::Tensor w = indexed({5, 6}), x = indexed({6, 2});
    const std::vector<DTensor> inputs = {distribute_tensor(w, mesh, {S1}), distribute_tensor(x, mesh, {S0})};
    LocalMapOptions options;
    options.in_placements = {{S0}, {R}};
    options.out_placements = {{S0}};
    options.out_sizes = {{5, 2}};
    EXPECT_ERROR(local_map(product_of, inputs, options), ErrorCode::invalid_argument,
                 "local_map: input 0 is DTensor of size [5, 6] as [S(1)] on DeviceMesh(2), expected placements [S(0)]");
    options.redistribute_inputs = true;
    const DTensor product = local_map(product_of, inputs, options)[0];
    EXPECT_EQ(product.placements(), Placements{S0});
    EXPECT_TRUE(at::equal(product.full_tensor(), at::matmul(w, x)));
    options.in_placements = {{}, {}};  // any
    options.redistribute_inputs = false;
    options.out_placements = {{P}};
    EXPECT_TRUE(at::equal(local_map(product_of, inputs, options)[0].full_tensor(), at::matmul(w, x)));
  });
}

// Each rank computes its rows of the result from a replicated weight, whose gradient is therefore partial.
TEST(LocalMapTest, GradientsArePlacedAsGiven) {
  run_local(2, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2});
    const at::Tensor x = indexed({4, 3}), w = indexed({3, 2}).requires_grad_();
    at::matmul(x, w).square().sum().backward();
    const at::Tensor weight = w.detach().clone().requires_grad_();
    const std::vector<DTensor> inputs = {distribute_tensor(x, mesh, {S0}), distribute_tensor(weight, mesh)};
    LocalMapOptions options;
    options.in_placements = {{S0}, {R}};
    options.in_grad_placements = {{}, {P}};
    options.out_placements = {{S0}};
    local_map(product_of, inputs, options)[0].to_local().square().sum().backward();
    EXPECT_TRUE(at::equal(inputs[1].to_local().grad(), w.grad()));
  });
}

TEST(LocalMapTest, InputsMayBeOnSeveralMeshes) {
  run_local(4, [](const ProcessGroup& group) {
    const DeviceMesh square(group, {2, 2}, {"a", "b"}), line(group, {4});
    const at::Tensor x = indexed({4, 4}), y = indexed({8, 2});
    const std::vector<DTensor> inputs = {distribute_tensor(x, square, {S0, S1}), distribute_tensor(y, line, {S0})};
    LocalMapOptions options;
    options.out_placements = {{S0}};
    options.device_mesh = line;
    const DTensor sum =
        local_map([](const Locals& locals) { return Locals{locals[0] + locals[1]}; }, inputs, options)[0];
    EXPECT_EQ(sum.device_mesh(), line);
    EXPECT_TRUE(at::equal(sum.to_local(), inputs[0].to_local() + inputs[1].to_local()));
  });
}

TEST(LocalMapTest, WhatDoesntFitIsRefusedAndRanksOutsideDontCompute) {
  run_local(3, [](const ProcessGroup& group) {
    const DeviceMesh mesh = DeviceMesh::of_ranks(group, {2}, {2, 0});
    const std::vector<DTensor> inputs = {distribute_tensor(indexed({4, 4}), mesh, {S0})};
    LocalMapOptions options;
    options.out_placements = {{S0}};
    bool is_called = false;
    const auto twice = [&](const Locals& locals) {
      is_called = true;
      return Locals{locals[0] * 2};
    };
    const DTensor doubled = local_map(twice, inputs, options)[0];
    EXPECT_EQ(is_called, mesh.has_this_rank());
    if (!mesh.has_this_rank()) return;
    EXPECT_TRUE(at::equal(doubled.full_tensor(), indexed({4, 4}) * 2));
    const auto refused = [&](const LocalMapOptions& wrong, const char* expected) {
      EXPECT_ERROR(local_map(twice, inputs, wrong), ErrorCode::invalid_argument, expected);
    };
    LocalMapOptions wrong = options;
    wrong.in_placements = {{S0}, {S0}};
    refused(wrong, "local_map with 2 in_placements: expected 1, one for each");
    wrong = options;
    wrong.in_grad_placements = {{S0}, {S0}};
    refused(wrong, "local_map with 2 in_grad_placements: expected 1");
    wrong = options;
    wrong.out_placements = {{S0}, {S0}};
    refused(wrong, "local_map with 2 out_placements: the function returned 1 tensors, expected 2");
    wrong = options;
    wrong.out_sizes = {{4, 4}, {4, 4}};
    refused(wrong, "local_map with 2 out_sizes: expected 1");
    wrong.out_sizes = {{6, 4}};
    refused(wrong, "this rank's local tensor has size [2, 4], expected [3, 4]");
    EXPECT_ERROR(local_map(twice, {}, options), ErrorCode::invalid_argument, "local_map without inputs");
    EXPECT_ERROR(
        local_map([](const Locals& locals) { return Locals{at::matmul(locals[0], locals[0])}; }, inputs, options),
        ErrorCode::invalid_argument, "local_map: ");
    EXPECT_ERROR(local_map([](const Locals&) { return Locals{at::Tensor()}; }, inputs, options),
                 ErrorCode::invalid_argument, "it is undefined");
  });
}

}  // namespace
}  // namespace tessera
