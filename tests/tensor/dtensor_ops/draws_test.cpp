// Random values in place, samples of weighted categories, and rrelu.

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "support/error_matchers.h"
#include "tensor/mesh_support.h"
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

// Calls f(mesh, placements) for all placements on several meshes, the first of which is of one rank.
template <typename F>
void on_all_meshes(const Placements& choices, const F& f) {
  for (const Sizes& shape : {Sizes{1}, Sizes{3}, Sizes{2, 2}}) {
    run_local(static_cast<int>(mesh_size(shape)), [&](const ProcessGroup& group) {
      const DeviceMesh mesh(group, shape);
      for (const Placements& placements : cross(choices, shape.size())) f(mesh, placements);
    });
  }
}

bool is_in_range(const at::Tensor& tensor, double least, double most) {
  return tensor.ge(least).logical_and(tensor.le(most)).all().item<bool>();
}

// Returns the share of elements for which a mask is true.
double share(const at::Tensor& mask) { return mask.to(at::kDouble).mean().item<double>(); }

TEST(DistributionTest, RoundingToHalfPrecisionLeavesNoRange) {
  run_local(1, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {1});
    PhiloxGenerator generator(5);
    for (const at::ScalarType dtype : {at::kHalf, at::kBFloat16}) {
      const DTensor ones = dtensor::ones({1000, 100}, mesh, {}, dtype);
      EXPECT_EQ(share(dtensor::bernoulli(ones, generator).full_tensor().eq(1)), 1);
      EXPECT_EQ(share(dtensor::bernoulli_(dtensor::zeros_like(ones), generator, 1).full_tensor().eq(1)), 1);
      EXPECT_TRUE(is_in_range(dtensor::randint_like(ones, generator, 0, 999).full_tensor(), 0, 998));
    }
  });
}

TEST(DistributionTest, NumbersAreTheSameOnAnyMesh) {
  at::Tensor expected;
  on_all_meshes({R, S0, S1, Placement::strided_shard(0, 2)}, [&](const DeviceMesh& mesh, const Placements& placements) {
    PhiloxGenerator generator(9);
    const DTensor x = dtensor::zeros({7, 6}, mesh, placements, at::kDouble),
                  counts = dtensor::zeros({7, 6}, mesh, placements, at::kLong);
    std::vector<at::Tensor> found = {dtensor::exponential_(x, generator, 2).full_tensor().clone(),
                                     dtensor::log_normal_(x, generator, 0.5, 0.25).full_tensor().clone(),
                                     dtensor::geometric_(x, generator, 0.25).full_tensor().clone(),
                                     dtensor::geometric_(counts, generator, 0.25).full_tensor().to(at::kDouble),
                                     dtensor::bernoulli_(counts, generator, 0.25).full_tensor().to(at::kDouble)};
    EXPECT_EQ(generator, PhiloxGenerator(9, 105));
    for (const DTensor& drawn : {dtensor::rand_like(x, generator), dtensor::randn_like(x, generator),
                                 dtensor::randint_like(counts, generator, -3, 4)}) {
      EXPECT_EQ(drawn.placements(), placements);
      found.push_back(drawn.full_tensor().to(at::kDouble));
    }
    EXPECT_EQ(generator, PhiloxGenerator(9, 168));
    if (mesh.size() == 1 && !expected.defined()) expected = at::stack(found);
    EXPECT_TRUE(at::equal(at::stack(found), expected)) << to_string(placements);
  });
  EXPECT_FALSE(at::equal(expected[2], expected[3]));
  const at::Tensor drawn = std::get<0>(at::_unique(expected[7]));
  EXPECT_TRUE(at::equal(drawn, at::arange(-3, 4, at::kDouble))) << drawn;
}

TEST(DistributionTest, TheyAreAsNamed) {
  run_local(1, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {1});
    PhiloxGenerator generator(1);
    for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
      const DTensor x = dtensor::zeros({500, 1000}, mesh, {}, dtype);
      const at::Tensor times = dtensor::exponential_(x, generator, 2).full_tensor().clone();
      EXPECT_TRUE(is_in_range(times, 1e-12, 20));
      EXPECT_NEAR(times.mean().item<double>(), 0.5, 0.005);
      EXPECT_NEAR(times.var().item<double>(), 0.25, 0.005);
      EXPECT_NEAR(share(times.gt(1)), std::exp(-2.0), 0.003);
      const at::Tensor logarithms = dtensor::log_normal_(x, generator, 0.5, 0.25).full_tensor().log();
      EXPECT_NEAR(logarithms.mean().item<double>(), 0.5, 0.003);
      EXPECT_NEAR(logarithms.std().item<double>(), 0.25, 0.003);
      const at::Tensor trials = dtensor::geometric_(x, generator, 0.25).full_tensor();
      EXPECT_TRUE(at::equal(trials, trials.round()));
      EXPECT_TRUE(is_in_range(trials, 1, 100));
      EXPECT_NEAR(share(trials.eq(1)), 0.25, 0.003);
      EXPECT_NEAR(share(trials.eq(3)), 0.25 * 0.75 * 0.75, 0.003);
      EXPECT_NEAR(trials.mean().item<double>(), 4, 0.03);
    }
  });
}

TEST(DistributionTest, WhatDoesNotFitIsRefused) {
  run_local(2, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2});
    PhiloxGenerator generator(1);
    const DTensor x = dtensor::zeros({4}, mesh), partial = dtensor::zeros({4}, mesh, {P}),
                  numbers = dtensor::zeros({4}, mesh, {}, at::kLong);
    EXPECT_ERROR(dtensor::exponential_(x, generator, 0), ErrorCode::invalid_argument,
                 "exponential_ with rate 0: expected more than 0");
    EXPECT_ERROR(dtensor::log_normal_(x, generator, 1, 0), ErrorCode::invalid_argument,
                 "log_normal_ with standard deviation 0: expected more than 0");
    for (const double p : {0.0, 1.0, std::nan("")}) {
      EXPECT_ERROR(dtensor::geometric_(x, generator, p), ErrorCode::invalid_argument, "geometric_ with probability",
                   "expected more than 0 and less than 1");
    }
    EXPECT_ERROR(dtensor::uniform_(x, generator, 2, 1), ErrorCode::invalid_argument, "uniform_ from 2 to 1");
    EXPECT_ERROR(dtensor::normal_(x, generator, 0, -1), ErrorCode::invalid_argument,
                 "normal_ with standard deviation -1: expected at least 0");
    EXPECT_ERROR(dtensor::randint_like(x, generator, 3, 3), ErrorCode::invalid_argument, "randint_like from 3 to 3");
    EXPECT_ERROR(dtensor::exponential_(numbers, generator), ErrorCode::invalid_argument,
                 "expected a floating-point dtype");
    EXPECT_ERROR(dtensor::exponential_(partial, generator), ErrorCode::unsupported, "would change the placements");
    EXPECT_EQ(generator, PhiloxGenerator(1)) << "a call that failed advanced it";
  });
}

TEST(MultinomialTest, RowsDrawTheSameOnAnyMesh) {
  const at::Tensor weights = at::sin(indexed({7, 6})).abs();
  for (const bool replacement : {false, true}) {
    at::Tensor expected, of_one;
    on_all_meshes({R, S0, S1, Placement::strided_shard(0, 2), P},
                  [&](const DeviceMesh& mesh, const Placements& placements) {
                    PhiloxGenerator generator(9);
                    const DTensor x = on_mesh(weights, mesh, placements);
                    const DTensor drawn = dtensor::multinomial(x, 4, generator, replacement);
                    EXPECT_EQ(generator, PhiloxGenerator(9, replacement ? 14 : 21));
                    if (mesh.size() > 1 && placements == Placements(placements.size(), S0)) {
                      EXPECT_EQ(drawn.placements(), placements) << "rows are gathered";
                    }
                    const at::Tensor found = drawn.full_tensor();
                    EXPECT_EQ(found.scalar_type(), at::kLong);
                    if (!expected.defined()) expected = found;
                    EXPECT_TRUE(at::equal(found, expected)) << to_string(placements) << found << expected;
                  });
    EXPECT_EQ(expected.sizes(), (Sizes{7, 4}));
    EXPECT_TRUE(is_in_range(expected, 0, 5));
  }
}

TEST(MultinomialTest, CategoriesComeInProportionToTheirWeights) {
  run_local(2, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2});
    PhiloxGenerator generator(3);
    const at::Tensor weights = at::tensor({2.0, 0.0, 5.0, 3.0, 0.0});
    const DTensor row = distribute_tensor(weights, mesh, {R}),
                  rows = distribute_tensor(weights.expand({100000, 5}).contiguous(), mesh, {S0});
    const at::Tensor again = dtensor::multinomial(row, 100000, generator, true).full_tensor(),
                     once = dtensor::multinomial(rows, 3, generator).full_tensor();
    EXPECT_EQ(again.sizes(), Sizes{100000});
    const at::Tensor expected = weights / 10;
    for (const at::Tensor& first : {again, once.select(1, 0)}) {
      const at::Tensor shares = at::bincount(first, {}, 5).to(at::kDouble) / 100000;
      EXPECT_TRUE(at::allclose(shares, expected, 0, 0.006)) << shares;
      EXPECT_EQ(shares[1].item<double>(), 0);
    }
    // Without replacement: each category with a weight once. The second after category 2: in the shares of the others.
    EXPECT_TRUE(at::equal(std::get<0>(once.sort(1)), at::tensor({0, 2, 3}, at::kLong).expand({100000, 3})));
    const at::Tensor after_two = once.select(1, 1).masked_select(once.select(1, 0).eq(2));
    EXPECT_NEAR(share(after_two.eq(3)), 0.6, 0.01);
  });
}

TEST(MultinomialTest, WhatCannotBeDrawnIsRefusedOnAllRanks) {
  run_local(2, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2});
    PhiloxGenerator generator(3);
    const auto rows = [&](std::vector<double> of_first, const at::ScalarType dtype = at::kDouble) {
      return distribute_tensor(at::stack({at::tensor(of_first), at::ones({3}, at::kDouble)}).to(dtype), mesh, {S0});
    };
    for (const double bad : {-1.0, std::nan(""), std::numeric_limits<double>::infinity()}) {
      EXPECT_ERROR(dtensor::multinomial(rows({1, bad, 1}), 1, generator), ErrorCode::invalid_argument,
                   "multinomial: a row has weights that are negative or not finite");
    }
    EXPECT_ERROR(dtensor::multinomial(rows({1, 0, 0}), 2, generator), ErrorCode::invalid_argument,
                 "at least 2 above 0");
    EXPECT_ERROR(dtensor::multinomial(rows({0, 0, 0}), 2, generator, true), ErrorCode::invalid_argument,
                 "at least 1 above 0");
    EXPECT_ERROR(dtensor::multinomial(rows({1, 1, 1}), 4, generator), ErrorCode::invalid_argument,
                 "multinomial of 4 samples without replacement from size [2, 3]");
    EXPECT_ERROR(dtensor::multinomial(rows({1, 1, 1}), 0, generator, true), ErrorCode::invalid_argument,
                 "at least one sample");
    EXPECT_ERROR(dtensor::multinomial(rows({1, 1, 1}, at::kLong), 1, generator), ErrorCode::invalid_argument,
                 "of Long");
    EXPECT_ERROR(dtensor::multinomial(dtensor::ones({2, 2, 2}, mesh), 1, generator), ErrorCode::invalid_argument,
                 "from size [2, 2, 2]");
    EXPECT_ERROR(dtensor::multinomial(dtensor::ones({0}, mesh), 1, generator, true), ErrorCode::invalid_argument,
                 "from size [0]");
    EXPECT_EQ(generator, PhiloxGenerator(3)) << "a call that failed advanced it";
  });
}

TEST(RreluTest, SlopesAreTheSameOnAnyMeshAndScaleTheGradient) {
  const at::Tensor full = at::sin(indexed({7, 6}) * 2);
  at::Tensor expected;
  on_all_meshes({R, S0, S1, P}, [&](const DeviceMesh& mesh, const Placements& placements) {
    PhiloxGenerator generator(5);
    const DTensor x = on_mesh(full, mesh, placements).requires_grad_();
    const at::Tensor found = dtensor::rrelu(x, generator, 0.25, 0.75).full_tensor();
    EXPECT_EQ(generator, PhiloxGenerator(5, 21));
    found.sum().backward();
    if (!expected.defined()) expected = found.detach();
    EXPECT_TRUE(at::allclose(found, expected)) << to_string(placements);
    EXPECT_TRUE(at::allclose(x.grad()->full_tensor() * full, expected)) << to_string(placements);
  });
  const at::Tensor slopes = expected / full;
  EXPECT_TRUE(at::equal(slopes.gt(0.999), full.gt(0)));
  const at::Tensor drawn = slopes.masked_select(full.le(0));
  EXPECT_TRUE(is_in_range(drawn, 0.25, 0.75));
  EXPECT_GT(drawn.std().item<double>(), 0.1);
  run_local(1, [](const ProcessGroup& group) {
    PhiloxGenerator generator(5);
    const DTensor x = dtensor::ones({2}, DeviceMesh(group, {1}));
    EXPECT_ERROR(dtensor::rrelu(x, generator, 2, 1), ErrorCode::invalid_argument, "rrelu with slopes from 2 to 1");
    EXPECT_ERROR(dtensor::rrelu(x, 2, 1), ErrorCode::invalid_argument, "rrelu with slopes from 2 to 1");
  });
}

}  // namespace
}  // namespace tessera
