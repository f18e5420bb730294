// Inputs and results of modules are redistributed as a plan states.

#include "tessera/tensor/parallel/prepare_module.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "support/error_matchers.h"
#include "tensor/mesh_support.h"
#include "tessera/comm/comm_debug_mode.h"
#include "tessera/comm/local_ranks.h"
#include "tessera/tensor/tensor_parallel.h"

namespace tessera {
namespace {

using testing::indexed;
using testing::P;
using testing::part_of;
using testing::R;
using testing::S0;
using testing::S1;

// Returns what it was given, prepared, so that a test sees it.
struct EchoImpl : torch::nn::Module, PreparedModule {
  std::vector<at::Tensor> forward(const std::vector<at::Tensor>& inputs) {
    return prepare_outputs(prepare_inputs(inputs));
  }
  at::Tensor forward(const at::Tensor& input) { return prepare_output(prepare_input(input)); }
};
TORCH_MODULE(Echo);

at::Tensor local_part_of(const at::Tensor& full, const DeviceMesh& mesh, const Placement& placement) {
  return part_of(full, MeshLayout(full.sizes().vec(), mesh.shape(), {placement}), *mesh.coordinate());
}

TEST(PrepareModuleTest, InputsAndResultsGetTheDesiredLayouts) {
  for (const int ranks : {1, 2, 3}) {
    run_local(ranks, [&](const ProcessGroup& group) {
      const DeviceMesh mesh(group, {ranks});
      const at::Tensor full = indexed({5, 4}), weights = indexed({5, 4}).cos();
      for (const Placement& given : {R, S0, S1}) {
        for (const Placement& desired : {R, S0, S1}) {
          for (const bool of_input : {true, false}) {
            Echo echo;
            if (of_input) {
              parallelize_module(*echo, mesh, {{"", PrepareModuleInput{{given}, {desired}}}});
            } else {
              parallelize_module(*echo, mesh, {{"", PrepareModuleOutput{{given}, {desired}}}});
            }
            const at::Tensor leaf = local_part_of(full, mesh, given).requires_grad_();
            const CommDebugMode mode(group);
            const at::Tensor result = echo->forward(leaf);
            if (given == desired) {
              EXPECT_EQ(mode.total(), 0);
            }
            ASSERT_TRUE(at::equal(result, local_part_of(full, mesh, desired))) << given << " to " << desired;
            (result * local_part_of(weights, mesh, desired)).sum().backward();
            ASSERT_TRUE(at::equal(leaf.grad(), local_part_of(weights, mesh, given))) << given << " to " << desired;
          }
        }
      }
      // Results that the ranks add up to.
      Echo sum;
      parallelize_module(*sum, mesh, {{"", PrepareModuleOutput{{P}, {R}}}});
      const at::Tensor mine = at::full({2}, group.rank() + 1.0, at::kDouble).requires_grad_();
      const at::Tensor added = sum->forward(mine);
      EXPECT_TRUE(at::equal(added, at::full({2}, ranks * (ranks + 1) / 2.0, at::kDouble)));
      added.sum().backward();
      EXPECT_TRUE(at::equal(mine.grad(), at::ones({2}, at::kDouble)));
    });
  }
}

TEST(PrepareModuleTest, SeveralInputsAndBothAtOnce) {
  run_local(2, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2});
    const at::Tensor a = indexed({4, 2}), b = indexed({2, 6}), other = at::arange(3);
    Echo echo;
    parallelize_module(*echo, mesh,
                       {{"", PrepareModuleInputOutput{{{S0, std::nullopt, R}, {R, std::nullopt, S1}},
                                                      {{R, std::nullopt, S1}, {S1, std::nullopt, R}}}}});
    EXPECT_TRUE(echo->is_prepared());
    const std::vector<at::Tensor> results =
        echo->forward(std::vector<at::Tensor>{local_part_of(a, mesh, S0), other, b});
    ASSERT_EQ(results.size(), 3u);
    EXPECT_TRUE(at::equal(results[0], local_part_of(a, mesh, S1)));
    EXPECT_TRUE(results[1].is_same(other));
    EXPECT_TRUE(at::equal(results[2], b));
    EXPECT_ERROR(echo->forward(a), ErrorCode::invalid_argument,
                 "1 inputs of a prepared module: expected 3, one for each layout");
    // Without a style nothing changes.
    Echo plain;
    EXPECT_TRUE(plain->forward(a).is_same(a));
  });
}

// A model whose input is sharded: the root gathers it for its layers and splits the result again.
struct RootImpl : torch::nn::Module, PreparedModule {
  RootImpl() {
    register_module("net1", net1);
    register_module("net2", net2);
    to(at::kDouble);
    double phase = 0;
    for (const at::Tensor& parameter : parameters()) {
      parameter.detach().copy_(indexed(parameter.sizes().vec()).add(phase += 3).sin());
    }
  }
  at::Tensor forward(const at::Tensor& x) { return prepare_output(net2(at::relu(net1(prepare_input(x))))); }
  ParallelLinear net1{4, 6}, net2{6, 3};
};
TORCH_MODULE(Root);

TEST(PrepareModuleTest, TheRootModuleIsPreparedNextToItsLayers) {
  Root full;
  const at::Tensor x = indexed({5, 4}).sin().requires_grad_(), y = full->forward(x);
  y.square().sum().backward();
  run_local(2, [&](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2});
    Root net;
    parallelize_module(*net, mesh,
                       {{"", PrepareModuleInputOutput{{{S0}, {R}}, {{R}, {S0}}}},
                        {"net1", ColwiseParallel{}},
                        {"net2", RowwiseParallel{}}});
    const at::Tensor mine = local_part_of(x, mesh, S0).requires_grad_(), result = net->forward(mine);
    EXPECT_TRUE(at::allclose(result, local_part_of(y, mesh, S0), 1e-12, 1e-12));
    result.square().sum().backward();
    EXPECT_TRUE(at::allclose(mine.grad(), local_part_of(x.grad(), mesh, S0), 1e-12, 1e-12));
    EXPECT_TRUE(
        at::allclose(net->net1->weight.grad(), local_part_of(full->net1->weight.grad(), mesh, S0), 1e-12, 1e-12));
  });
}

TEST(PrepareModuleTest, StylesThatDontFitAreRefused) {
  run_local(2, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2});
    Root net;
    const auto refused = [&](const ParallelPlan& plan, const char* expected) {
      EXPECT_ERROR(parallelize_module(*net, mesh, plan), ErrorCode::invalid_argument, expected);
      EXPECT_FALSE(net->is_prepared());
      EXPECT_FALSE(net->net1->is_parallelized());
    };
    refused({{"net1", PrepareModuleInput{{R}, {S0}}}}, "expected a PreparedModule for PrepareModuleInput");
    refused({{"net1", ColwiseParallel{}}, {"", PrepareModuleInput{{R, R}, {S0}}}},
            "'': layouts (R, R) to (S(0)), expected one of each for the same tensors");
    refused({{"", PrepareModuleOutput{{R}, {std::nullopt}}}}, "'': layouts (R) to (none)");
    refused({{"", PrepareModuleInput{{R}, {S0}}}, {"", PrepareModuleOutput{{R}, {S0}}}}, "'' is already prepared");
    refused({{"", PrepareModuleInput{{R}, {group.rank() == 0 ? S0 : S1}}}},
            "rank 0 has module '' with inputs (R) to (S(0))");
    parallelize_module(*net, mesh, {{"", PrepareModuleInput{{S0}, {R}}}});
    EXPECT_ERROR(net->forward(at::zeros({1 + 2 * group.rank(), 4}, at::kDouble)), ErrorCode::invalid_argument,
                 "rank 0 of DeviceMesh(2) has 1 of 4 along the sharded dimension, expected 2");
  });
}

}  // namespace
}  // namespace tessera
