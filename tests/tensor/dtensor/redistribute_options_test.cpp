// Redistribution in another dtype, of gradients, and what it and ops communicate.

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "support/error_matchers.h"
#include "tensor/mesh_support.h"
#include "tessera/comm/comm_debug_mode.h"
#include "tessera/comm/local_ranks.h"
#include "tessera/tensor/dtensor.h"
#include "tessera/tensor/dtensor/explicit_redistribution.h"
#include "tessera/tensor/dtensor/separate_reductions.h"
#include "tessera/tensor/dtensor_factories.h"
#include "tessera/tensor/dtensor_ops.h"

namespace tessera {
namespace {

using testing::cross;
using testing::indexed;
using testing::local_of;
using testing::P;
using testing::part_of;
using testing::R;
using testing::S0;
using testing::S1;
using testing::Sizes;

DTensor placed(const at::Tensor& local, const DeviceMesh& mesh, const Placements& placements, const Sizes& size) {
  FromLocalOptions options;
  options.size = size;
  return DTensor::from_local(local, mesh, placements, options);
}

// The tensors are conversions of 1/3, 2/3, ..., so that each dtype rounds differently.
TEST(RedistributeOptionsTest, ElementsAndGradientsAreSentInTheDtypesGiven) {
  run_local(3, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {3});
    const Sizes size = {5, 2};
    const at::Tensor full = indexed(size).div(3), weights = indexed(size).div(7);
    for (const Placement& from : {R, S0, S1}) {
      for (const Placement& to : {R, S0, S1}) {
        RedistributeOptions options;
        options.forward_dtype = at::kBFloat16;
        options.backward_dtype = at::kFloat;
        const MeshLayout layout(size, {3}, {from});
        const at::Tensor leaf = part_of(full, layout, *mesh.coordinate()).requires_grad_();
        const DTensor after = placed(leaf, mesh, {from}, size).redistribute({to}, options);
        ASSERT_EQ(after.scalar_type(), at::kBFloat16);
        ASSERT_TRUE(at::equal(after.to_local(), part_of(full.to(at::kBFloat16), after.layout(), *mesh.coordinate())));
        const at::Tensor of_result = part_of(weights.to(at::kBFloat16), after.layout(), *mesh.coordinate());
        after.to_local().backward(of_result);
        ASSERT_EQ(leaf.grad().scalar_type(), at::kDouble);
        ASSERT_TRUE(
            at::equal(leaf.grad(), part_of(weights.to(at::kBFloat16).to(at::kDouble), layout, *mesh.coordinate())))
            << from << " to " << to;
      }
    }
    // The gradient alone is rounded.
    RedistributeOptions options;
    options.backward_dtype = at::kHalf;
    const at::Tensor leaf = part_of(full, MeshLayout(size, {3}, {S0}), *mesh.coordinate()).requires_grad_();
    const DTensor after = placed(leaf, mesh, {S0}, size).redistribute({}, options);
    ASSERT_TRUE(at::equal(after.to_local(), full));
    after.to_local().backward(weights);
    ASSERT_TRUE(at::equal(
        leaf.grad(), part_of(weights.to(at::kHalf).to(at::kDouble), MeshLayout(size, {3}, {S0}), *mesh.coordinate())));
    // The tensor is summed in the dtype that is sent.
    RedistributeOptions in_half;
    in_half.forward_dtype = at::kHalf;
    const at::Tensor summed =
        placed(at::full({1}, 0.1, at::kDouble), mesh, {P}, {1}).redistribute({}, in_half).to_local();
    const at::Tensor tenth = at::full({1}, 0.1, at::kHalf);
    EXPECT_TRUE(at::equal(summed, tenth + tenth + tenth));
    const LocalShardsWrapper none({}, {});
    EXPECT_ERROR(DTensor::from_local(none, mesh, {S0}, {0}).redistribute({R}, in_half), ErrorCode::unsupported,
                 "redistribute in another dtype is not supported for LocalShardsWrapper");
  });
}

// Ranks that send other dtypes would misread each other's elements. Those that place gradients otherwise would wait.
TEST(RedistributeOptionsTest, OptionsThatDifferBetweenRanksAreErrorsOnAll) {
  run_local(2, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2});
    const bool is_second = group.rank() == 1;
    const DTensor x = distribute_tensor(indexed({4, 2}), mesh, {S0});
    RedistributeOptions options;
    options.forward_dtype = is_second ? at::kBFloat16 : at::kHalf;
    EXPECT_ERROR(x.redistribute({R}, options), ErrorCode::invalid_argument,
                 "rank 0 has sent dtype Half and rank 1 has sent dtype BFloat16, expected the same on all ranks");
    options.forward_dtype.reset();
    if (is_second) options.backward_dtype = at::kFloat;
    EXPECT_ERROR(x.redistribute({R}, options), ErrorCode::invalid_argument,
                 "rank 0 has sent dtype of the gradient Double and rank 1 has sent dtype of the gradient Float");
    // The dtype of the tensor is the default.
    options.backward_dtype.reset();
    if (is_second) options.forward_dtype = at::kDouble;
    EXPECT_TRUE(at::equal(x.redistribute({R}, options).to_local(), indexed({4, 2})));
    const LocalShardsWrapper row({at::ones({1, 2})}, {{group.rank(), 0}});
    EXPECT_ERROR(DTensor::from_local(row, mesh, {S0}, {2, 2}).redistribute({R}, options), ErrorCode::unsupported,
                 "rank 1", "redistribute in another dtype is not supported for LocalShardsWrapper");

    FromLocalOptions checked;
    checked.run_check = true;
    if (is_second) checked.grad_placements = {R};
    EXPECT_ERROR(DTensor::from_local(at::ones({2}), mesh, {S0}, checked), ErrorCode::invalid_argument,
                 "rank 0 has placements of the gradient [] and rank 1 has placements of the gradient [R]");
    if (is_second) checked.grad_placements = {R, R};
    EXPECT_ERROR(DTensor::from_local(at::ones({2}), mesh, {S0}, checked), ErrorCode::invalid_argument, "rank 1",
                 "expected one for each");
    EXPECT_TRUE(at::equal(x.full_tensor(), indexed({4, 2})));
  });
}

TEST(RedistributeOptionsTest, TheGradientOfALocalTensorIsPlacedAsFromLocalIsTold) {
  run_local(2, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2});
    const at::Tensor full = indexed({4, 3}), weights = indexed({4, 3}).mul(2);
    for (const auto& [is, of_gradient] : std::vector<std::pair<Placement, Placement>>{{R, R}, {R, P}, {P, P}, {P, R}}) {
      FromLocalOptions options;
      options.grad_placements = {of_gradient};
      const at::Tensor leaf = local_of(full, MeshLayout({4, 3}, {2}, {is}), *mesh.coordinate()).requires_grad_();
      const DTensor x = DTensor::from_local(leaf, mesh, {is}, options);
      ASSERT_TRUE(at::equal(x.full_tensor(), full));
      (x.full_tensor() * weights).sum().backward();
      at::Tensor gradient = leaf.grad().clone();
      if (of_gradient == P) group.all_reduce(gradient);
      ASSERT_TRUE(at::allclose(gradient, weights)) << is << " with gradient " << of_gradient;
    }
    FromLocalOptions options;
    options.grad_placements = {S0};
    options.run_check = true;
    const at::Tensor leaf = at::ones({4}, at::kDouble).requires_grad_();
    const DTensor x = DTensor::from_local(leaf.narrow(0, 0, 2), mesh, {S0}, options);
    (x.full_tensor() * at::arange(4, at::kDouble)).sum().backward();
    EXPECT_TRUE(at::equal(leaf.grad().narrow(0, 0, 2), at::arange(4, at::kDouble).narrow(0, 2 * group.rank(), 2)));
    options.grad_placements = {S0, S0};
    EXPECT_ERROR(DTensor::from_local(leaf, mesh, {R}, options), ErrorCode::invalid_argument, "expected one for each");
  });
}

// The second derivative of sum(w * x^3) is 6 w x.
TEST(RedistributeOptionsTest, SecondDerivativesAreThoseOfTheFullTensor) {
  for (const Sizes& shape : {Sizes{2}, Sizes{3}, Sizes{2, 2}}) {
    run_local(static_cast<int>(mesh_size(shape)), [&](const ProcessGroup& group) {
      const DeviceMesh mesh(group, shape);
      const Sizes size = {5, 3};
      const at::Tensor full = indexed(size), weights = indexed(size).add(2);
      for (const Placements& from : cross({R, S0, S1}, shape.size())) {
        for (const Placements& to : cross({R, S0, S1}, shape.size())) {
          const MeshLayout before(size, shape, from), after(size, shape, to);
          const at::Tensor x = part_of(full, before, *mesh.coordinate()).requires_grad_();
          const at::Tensor y = placed(x, mesh, from, size).redistribute(to).to_local();
          const at::Tensor loss = (y.pow(3) * part_of(weights, after, *mesh.coordinate())).sum();
          const at::Tensor first = torch::autograd::grad({loss}, {x}, {}, true, true)[0];
          ASSERT_TRUE(at::equal(first, 3 * x.square() * part_of(weights, before, *mesh.coordinate())));
          first.sum().backward();
          ASSERT_TRUE(at::equal(x.grad(), 6 * x.detach() * part_of(weights, before, *mesh.coordinate())))
              << to_string(from) << " to " << to_string(to);
        }
      }
    });
  }
}

TEST(RedistributeOptionsTest, AnInPlaceOpOnTheLocalTensorChangesTheDTensor) {
  run_local(2, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2});
    const at::Tensor full = indexed({4, 3}).requires_grad_();
    const DTensor x = distribute_tensor(full, mesh, {S0});
    const DTensor doubled = dtensor::mul(x, 2);
    doubled.to_local().narrow(0, 0, 1).mul_(5);
    const at::Tensor expected = full.detach() * 2;
    expected.index({0}).mul_(5);
    expected.index({2}).mul_(5);
    EXPECT_TRUE(at::equal(doubled.full_tensor(), expected));
    doubled.full_tensor().sum().backward();
    const at::Tensor gradient = at::full({2, 3}, 2.0, at::kDouble);
    gradient.index({0}).mul_(5);
    EXPECT_TRUE(at::equal(x.to_local().grad(), gradient));
    const at::Tensor detached = x.detach().to_local();
    EXPECT_FALSE(detached.requires_grad());
    EXPECT_TRUE(detached.is_alias_of(x.to_local()));
  });
}

TEST(RedistributeOptionsTest, OnMetaOnlyTheShapesChange) {
  run_local(3, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {3});
    const CommDebugMode mode(group);
    const DTensor rows = dtensor::empty({7, 5}, mesh, {S0}, at::TensorOptions().device(at::kMeta));
    for (const Placement& to : {R, S0, S1, P}) {
      const DTensor after = rows.redistribute({to});
      EXPECT_TRUE(after.to_local().is_meta());
      EXPECT_EQ(after.to_local().sizes(), after.layout().local_shape(*mesh.coordinate()).sizes) << to;
    }
    EXPECT_EQ(mode.total(), 0);
  });
}

TEST(RedistributeOptionsTest, OnlyWhatMustBeSentIsSent) {
  run_local(4, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2, 2});
    const DTensor full = distribute_tensor(indexed({4, 6}).requires_grad_(), mesh);
    const CommDebugMode none(group);
    const DTensor sharded = full.redistribute({S0, S1}), partial = full.redistribute({P, R});
    const DTensor product = dtensor::mul(dtensor::relu(sharded), 3);
    static_cast<void>(dtensor::linear(full.redistribute({S0, R}), full));
    product.to_local().sum();
    EXPECT_EQ(none.total(), 0) << "of " << none.counts().begin()->first;
    const CommDebugMode of_sum(group);
    partial.redistribute();
    EXPECT_EQ(of_sum.counts(), (std::map<std::string, std::int64_t>{{"all_reduce", 1}}));
    const CommDebugMode of_scatter(group);
    partial.redistribute({S0, R});
    EXPECT_EQ(of_scatter.counts(), (std::map<std::string, std::int64_t>{{"reduce_scatter_into", 1}}));
  });
}

// Partial tensors of integers whose sums are exact, so that the order does not matter.
TEST(MergedReductionTest, SeveralMeshDimensionsAreReducedAtOnceWhereThereIsAGroup) {
  const Placement average = Placement::partial(ReduceOp::average), max = Placement::partial(ReduceOp::max);
  run_local(8, [&](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2, 2, 2}, {"a", "b", "c"});
    // Returns how many collectives the redistribution took.
    const auto count_of = [&](const Sizes& size, const Placements& from, const Placements& to) {
      const at::Tensor full = indexed(size).mul(8);
      const MeshLayout before(size, mesh.shape(), from);
      const DTensor x = placed(local_of(full, before, *mesh.coordinate()), mesh, from, size);
      const CommDebugMode mode(group);
      const DTensor result = x.redistribute(to);
      auto counts = mode.counts();
      EXPECT_EQ(result.placements(), to);
      EXPECT_TRUE(at::equal(result.full_tensor(), full)) << to_string(from) << " to " << to_string(to);
      return counts;
    };
    using Counts = std::map<std::string, std::int64_t>;
    const auto sums = [](std::int64_t count) { return Counts{{"all_reduce", count}}; };
    const auto scatters = [](std::int64_t count) { return Counts{{"reduce_scatter_into", count}}; };
    EXPECT_EQ(count_of({8, 3}, {P, R, R}, {R, R, R}), sums(1));
    EXPECT_EQ(count_of({8, 3}, {P, P, P}, {R, R, R}), sums(1));  // the group of all ranks
    EXPECT_EQ(count_of({8, 3}, {P, average, P}, {R, R, R}), sums(1));
    EXPECT_EQ(count_of({8, 3}, {average, average, average}, {R, R, R}), sums(1));
    EXPECT_EQ(count_of({8, 3}, {max, max, max}, {R, R, R}), sums(1));
    {
      const SeparateReductions separately;
      EXPECT_EQ(count_of({8, 3}, {P, P, P}, {R, R, R}), sums(3));
      EXPECT_EQ(count_of({8, 3}, {P, P, P}, {S0, S0, S0}), scatters(3));
      { const SeparateReductions nested; }
      EXPECT_EQ(count_of({8, 3}, {P, average, P}, {R, R, R}), sums(3));
    }
    EXPECT_EQ(count_of({8, 3}, {P, P, P}, {R, R, R}), sums(1));
    EXPECT_EQ(count_of({8, 3}, {P, P, P}, {S0, S0, S0}), scatters(1));
    EXPECT_EQ(count_of({8, 3}, {P, average, P}, {S0, S0, S0}), scatters(1));
    EXPECT_NE(count_of({6, 3}, {P, P, P}, {S0, S0, S0}), scatters(1));  // uneven
    EXPECT_EQ(count_of({8, 4}, {P, P, R}, {S0, S1, R}), scatters(2));
    // Only where the mesh has a group along the dimensions: since sub-meshes were made.
    EXPECT_NE(count_of({8, 3}, {P, P, R}, {R, R, R}), sums(1));
    EXPECT_NE(count_of({8, 4}, {P, S1, P}, {S0, S1, S0}), scatters(1));
    static_cast<void>(mesh.submesh({"a", "b"}));
    static_cast<void>(mesh.submesh({"a", "c"}));
    EXPECT_EQ(count_of({8, 3}, {P, P, R}, {R, R, R}), sums(1));
    EXPECT_EQ(count_of({8, 4}, {P, S1, P}, {R, S1, R}), sums(1));
    EXPECT_EQ(count_of({8, 4}, {P, S1, P}, {S0, S1, S0}), scatters(1));
    EXPECT_NE(count_of({8, 4}, {S0, P, P}, {S0, R, R}), sums(1));
    // What the ranks get differs along the dimensions, or something else splits it.
    count_of({8, 4}, {P, P, R}, {R, S0, R});
    count_of({8, 4}, {P, S0, P}, {S0, S0, S0});
    count_of({8, 4}, {P, P, P}, {P, P, R});
  });
}

TEST(ExplicitRedistributionTest, OpsThatWouldRedistributeAreRefusedOnAllRanks) {
  run_local(2, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2});
    const DTensor rows = distribute_tensor(indexed({4, 4}), mesh, {S0}), columns = rows.redistribute({S1}),
                  full = rows.redistribute();
    const at::Tensor product = at::matmul(indexed({4, 4}), indexed({4, 4}));
    const auto strictly = [] {
      ExplicitRedistributionOptions options;
      options.strict = true;
      return options;
    };
    {
      const ExplicitRedistributionContext context;
      EXPECT_TRUE(at::equal(dtensor::matmul(rows, full).redistribute().to_local(), product));
      EXPECT_TRUE(at::equal(dtensor::matmul(columns, rows).full_tensor(), product));
      EXPECT_ERROR(dtensor::matmul(rows, columns), ErrorCode::invalid_argument,
                   "is redistributed to [R] by an op, expected a call of redistribute before it");
      EXPECT_ERROR(dtensor::softmax(dtensor::select(rows, 0, 1), 0), ErrorCode::invalid_argument,
                   "is redistributed to");
      EXPECT_ERROR(dtensor::unbind(rows, 0), ErrorCode::invalid_argument, "is redistributed to");
      // The group stays usable, and a redistribution that sends nothing is permitted.
      EXPECT_TRUE(at::equal(dtensor::add(rows, full).full_tensor(), indexed({4, 4}) * 2));
      {
        const ExplicitRedistributionContext strict(strictly());
        EXPECT_ERROR(dtensor::add(rows, full), ErrorCode::invalid_argument, "DTensor of size [4, 4] as [R]");
        // Explicit ones are permitted, whether the ranks compare their calls or not.
        EXPECT_EQ(rows.redistribute({S1}, /*compares_calls=*/false).placements(), Placements{S1});
        // A new tensor is no input that is redistributed.
        EXPECT_TRUE(at::equal(dtensor::full({4}, 2, mesh, {P}, at::kFloat).local_tensor(), at::ones({4})));
        ExplicitRedistributionOptions off;
        off.enable = false;
        const ExplicitRedistributionContext permitted(off);
        EXPECT_TRUE(at::equal(dtensor::matmul(rows, columns).full_tensor(), product));
      }
      EXPECT_ERROR(dtensor::matmul(rows, columns), ErrorCode::invalid_argument, "is redistributed to [R]");
    }
    std::vector<std::string> warnings;
    ExplicitRedistributionOptions options;
    options.warn = [&](const std::string& warning) { warnings.push_back(warning); };
    {
      const ExplicitRedistributionContext context(options);
      EXPECT_TRUE(at::equal(dtensor::matmul(rows, columns).full_tensor(), product));
      static_cast<void>(dtensor::add(rows, full));
    }
    EXPECT_THAT(warnings, ::testing::ElementsAre(::testing::HasSubstr("is redistributed to [R] by an op")));
    EXPECT_TRUE(at::equal(dtensor::matmul(rows, columns).full_tensor(), product));
  });
}

TEST(ExplicitRedistributionTest, GradientsThatWouldBeRedistributedAreRefusedInBackward) {
  run_local(2, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2});
    const at::Tensor full = indexed({4, 4});
    const auto backward = [](const DTensor& y) { dtensor::sum(y).full_tensor().backward({}, /*retain_graph=*/true); };
    const auto strict = [](bool is_strict, bool enable) {
      ExplicitRedistributionOptions options;
      options.strict = is_strict;
      options.enable = enable;
      return options;
    };
    const DTensor rows = distribute_tensor(full.clone().set_requires_grad(true), mesh, {S0}),
                  columns = distribute_tensor(full, mesh, {S1}),
                  replicated = distribute_tensor(full.clone().set_requires_grad(true), mesh, {R});
    // The op gathers the rows; their gradient is sharded, which sends nothing.
    const DTensor gathered = dtensor::cumsum(rows, 0);
    {
      const ExplicitRedistributionContext context(strict(true, true));
      EXPECT_ERROR(backward(gathered), ErrorCode::invalid_argument,
                   "gradient of size [4, 4] as [R] on DeviceMesh(2) is redistributed to [S(0)] by an op");
      {
        const ExplicitRedistributionContext lenient(strict(false, true));
        backward(gathered);
      }
      {
        const ExplicitRedistributionContext off(strict(true, false));
        backward(gathered);
      }
      EXPECT_ERROR(backward(gathered), ErrorCode::invalid_argument, "gradient");
    }
    EXPECT_TRUE(
        at::equal(rows.grad()->full_tensor(), 2 * at::arange(4, 0, -1, at::kDouble).view({4, 1}).expand({4, 4})));
    // The op takes a shard of the full tensor; its gradient is gathered.
    const DTensor sum = dtensor::add(replicated, columns);
    std::vector<std::string> warnings;
    {
      const ExplicitRedistributionContext context;
      EXPECT_ERROR(backward(sum), ErrorCode::invalid_argument, "gradient of size [4, 4] as [S(1)]", "to [R] by an op");
      ExplicitRedistributionOptions options;
      options.warn = [&](const std::string& warning) { warnings.push_back(warning); };
      const ExplicitRedistributionContext warns(options);
      backward(sum);
    }
    EXPECT_EQ(warnings.size(), 1u);
    // What the program redistributes, and what a scope permitted, may be redistributed back.
    const DTensor asked = dtensor::add(replicated.redistribute({S1}), columns);
    const ExplicitRedistributionContext context(strict(true, true));
    backward(asked);
    const auto permitted = [&] {
      const ExplicitRedistributionContext off(strict(true, false));
      return dtensor::add(replicated, columns);
    };
    backward(permitted());
    EXPECT_TRUE(at::equal(replicated.grad()->full_tensor(), at::full({4, 4}, 3.0, at::kDouble)));
  });
}

}  // namespace
}  // namespace tessera
