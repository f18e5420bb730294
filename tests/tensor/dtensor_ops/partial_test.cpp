// Ops that keep partial placements, and ops that write to a given tensor.

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "support/error_matchers.h"
#include "tensor/case_function.h"
#include "tensor/mesh_support.h"
#include "tessera/comm/local_ranks.h"
#include "tessera/tensor/dtensor/explicit_redistribution.h"
#include "tessera/tensor/dtensor_ops.h"
#include "tessera/tensor/dtensor_ops/convolution.h"

namespace tessera {
namespace {

using testing::CaseFunction;
using testing::cross;
using testing::indexed;
using testing::on_mesh;
using testing::R;
using testing::S0;
using testing::S1;
using testing::Sizes;

const Placement kSum = Placement::partial();
const Placement kAverage = Placement::partial(ReduceOp::average);
const Placement kMax = Placement::partial(ReduceOp::max);
const Placement kMin = Placement::partial(ReduceOp::min);

// An op of a [4, 3] and b [3], or [4, 3] if `is_matrix`, and the placement of its result for those of a and b.
struct Kept {
  std::string name;
  CaseFunction<DTensor(const DTensor& a, const DTensor& b)> ours;
  CaseFunction<at::Tensor(const at::Tensor& a, const at::Tensor& b)> aten;
  Placement a, b, result;
};

std::vector<Kept> kept() {
  using D = const DTensor&;
  using T = const at::Tensor&;
  const CaseFunction<DTensor(D, D)> add = [](D a, D b) { return a + b; }, sub = [](D a, D b) { return a - b; },
                                    mul = [](D a, D b) { return a * b; }, div = [](D a, D b) { return a / b; },
                                    greater = [](D a, D b) { return dtensor::maximum(a, b); },
                                    less = [](D a, D b) { return dtensor::minimum(a, b); };
  const CaseFunction<at::Tensor(T, T)> at_add = [](T a, T b) { return a + b; }, at_sub = [](T a, T b) { return a - b; },
                                       at_mul = [](T a, T b) { return a * b; }, at_div = [](T a, T b) { return a / b; },
                                       at_greater = [](T a, T b) { return at::maximum(a, b); },
                                       at_less = [](T a, T b) { return at::minimum(a, b); };
  return {
      {"add", add, at_add, kSum, kSum, kSum},
      {"add", add, at_add, kSum, R, kSum},
      {"add", add, at_add, R, kAverage, kAverage},
      {"add", add, at_add, kMax, R, kMax},
      {"add", add, at_add, R, kMin, kMin},
      {"add", add, at_add, kMax, kMax, kMax},  // one of them is reduced
      {"sub", sub, at_sub, kMax, R, kMax},
      {"sub", sub, at_sub, R, kMax, kMin},
      {"sub", sub, at_sub, R, kMin, kMax},
      {"sub", sub, at_sub, kAverage, R, kAverage},
      {"mul", mul, at_mul, kSum, R, kSum},
      {"mul", mul, at_mul, R, kAverage, kAverage},
      {"mul", mul, at_mul, kSum, kSum, kSum},
      {"mul", mul, at_mul, kMax, R, R},
      {"div", div, at_div, kSum, R, kSum},
      {"div", div, at_div, kAverage, R, kAverage},
      {"div", div, at_div, R, kSum, R},
      {"maximum", greater, at_greater, kMax, kMax, kMax},
      {"maximum", greater, at_greater, kMax, kSum, kMax},
      {"maximum", greater, at_greater, R, kMax, kMax},
      {"maximum", greater, at_greater, kMin, kSum, kMin},
      {"minimum", less, at_less, kMin, kMin, kMin},
      {"minimum", less, at_less, kAverage, kMin, kMin},
      {"neg", [](D a, D) { return dtensor::neg(a); }, [](T a, T) { return -a; }, kMax, R, kMin},
      {"neg", [](D a, D) { return dtensor::neg(a); }, [](T a, T) { return -a; }, kAverage, R, kAverage},
      {"exp", [](D a, D) { return dtensor::exp(a); }, [](T a, T) { return a.exp(); }, kMax, R, kMax},
      {"relu", [](D a, D) { return dtensor::relu(a); }, [](T a, T) { return a.relu(); }, kMin, R, kMin},
      {"relu", [](D a, D) { return dtensor::relu(a); }, [](T a, T) { return a.relu(); }, kSum, R, R},
      {"abs", [](D a, D) { return dtensor::abs(a); }, [](T a, T) { return a.abs(); }, kMax, R, R},
      {"mul_2", [](D a, D) { return a * 2; }, [](T a, T) { return a * 2; }, kMax, R, kMax},
      {"mul_minus_2", [](D a, D) { return a * -2; }, [](T a, T) { return a * -2; }, kMax, R, kMin},
      {"div_minus_2", [](D a, D) { return a / -2; }, [](T a, T) { return a / -2; }, kAverage, R, kAverage},
      {"add_1", [](D a, D) { return a + 1; }, [](T a, T) { return a + 1; }, kSum, R, R},
      {"add_1", [](D a, D) { return a + 1; }, [](T a, T) { return a + 1; }, kAverage, R, kAverage},
      {"sub_1", [](D a, D) { return a - 1; }, [](T a, T) { return a - 1; }, kMin, R, kMin},
      {"matmul", [](D a, D b) { return dtensor::matmul(a, b); }, [](T a, T b) { return at::matmul(a, b); }, kSum, R,
       kSum},
      {"matmul", [](D a, D b) { return dtensor::matmul(a, b); }, [](T a, T b) { return at::matmul(a, b); }, R, kAverage,
       kAverage},
      {"matmul", [](D a, D b) { return dtensor::matmul(a, b); }, [](T a, T b) { return at::matmul(a, b); }, S1, S0,
       kSum},
      {"einsum",
       [](D a, D b) {
         return dtensor::einsum("ij,j->ij", {a, b});
       },
       at_mul, kAverage, R, kAverage},
      {"amax", [](D a, D) { return dtensor::amax(a, {0}); }, [](T a, T) { return a.amax(0); }, kMax, R, kMax},
      {"amax", [](D a, D) { return dtensor::amax(a); }, [](T a, T) { return a.amax(); }, kMin, R, R},
      {"amin", [](D a, D) { return dtensor::amin(a); }, [](T a, T) { return a.amin(); }, kMin, R, kMin},
      {"nansum", [](D a, D) { return dtensor::nansum(a); }, [](T a, T) { return a.nansum(); }, S0, R, kSum},
      {"nansum", [](D a, D) { return dtensor::nansum(a); }, [](T a, T) { return a.nansum(); }, kSum, R, R},
      {"norm0", [](D a, D) { return dtensor::vector_norm(a - 3, 0); }, [](T a, T) { return (a - 3).norm(0); }, S0, R,
       kSum},
      {"norm0", [](D a, D) { return dtensor::vector_norm(a, 0); }, [](T a, T) { return a.norm(0); }, kSum, R, R},
      {"norm1", [](D a, D) { return dtensor::vector_norm(a, 1); }, [](T a, T) { return a.norm(1); }, S0, R, kSum},
      {"norm_inf", [](D a, D) { return dtensor::vector_norm(a, INFINITY); }, [](T a, T) { return a.norm(INFINITY); },
       S0, R, kMax},
      {"norm_minus_inf", [](D a, D) { return dtensor::vector_norm(a, -INFINITY); },
       [](T a, T) { return a.norm(-INFINITY); }, S0, R, kMin},
      {"norm_and_numbers", [](D a, D) { return (dtensor::vector_norm(a) * -2 + 1) / 4 - 7; },
       [](T a, T) { return (a.norm() * -2 + 1) / 4 - 7; }, S0, R, R},
      {"powsum", [](D a, D) { return dtensor::powsum(a, 3); }, [](T a, T) { return a.pow(3).sum(); }, S0, R, kSum},
      {"histc", [](D a, D) { return dtensor::histc(a, 4, 2, 9); }, [](T a, T) { return a.histc(4, 2, 9); }, S0, R,
       kSum},
  };
}

// Returns whether an op that keeps partial tensors reduces none of its inputs.
bool sends_nothing(const Kept& op) {
  if (!op.result.is_partial() || !op.a.is_partial() || !op.b.is_partial()) return op.result.is_partial();
  return op.a == op.b && op.name != "mul" && !(op.name == "add" && op.a == kMax);
}

TEST(DTensorPartialTest, StaysPartialWhereTheOpAllowsIt) {
  run_local(2, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2});
    const at::Tensor a = indexed({4, 3}), b = indexed({3}) + 2;
    for (const Kept& op : kept()) {
      const DTensor x = on_mesh(a, mesh, {op.a}), y = on_mesh(b, mesh, {op.b});
      if (sends_nothing(op)) {
        const ExplicitRedistributionContext is_explicit;  // refuses what sends elements
        op.ours(x, y);
      }
      const DTensor result = op.ours(x, y);
      EXPECT_EQ(result.placements(), Placements{op.result}) << op.name << op.a << op.b;
      EXPECT_TRUE(at::allclose(result.full_tensor(), op.aten(a, b)))
          << op.name << op.a << op.b << result.full_tensor() << op.aten(a, b);
    }
    // Strided shards of the summed dimension need no gather either.
    EXPECT_EQ(dtensor::sum(on_mesh(a, mesh, {Placement::strided_shard(0, 2)}), {0}).placements(), Placements{kSum});
    EXPECT_EQ(dtensor::sum(on_mesh(a, mesh, {Placement::strided_shard(0, 2)}), {1}).placements(),
              Placements{Placement::strided_shard(0, 2)});
    // What is added to a product is placed as the product.
    const DTensor product = dtensor::linear(on_mesh(a, mesh, {kAverage}), on_mesh(indexed({5, 3}), mesh, {R}),
                                            on_mesh(indexed({5}), mesh, {R}));
    EXPECT_EQ(product.placements(), Placements{kAverage});
    EXPECT_TRUE(at::allclose(product.full_tensor(), at::linear(a, indexed({5, 3}), indexed({5}))));
    const DTensor sum = dtensor::addmm(at::full({}, 3.0, at::kDouble), on_mesh(a, mesh, {S0}), indexed({3, 5}));
    EXPECT_EQ(sum.placements(), Placements{S0});
    EXPECT_TRUE(at::allclose(sum.full_tensor(), at::matmul(a, indexed({3, 5})) + 3));
    // Images keep shards of batch and channels.
    for (const Placement& shard : {S0, S1}) {
      const DTensor images = on_mesh(indexed({4, 2, 3, 3}), mesh, {shard}).requires_grad_();
      EXPECT_EQ(dtensor::interpolate(images, {5, 2}).placements(), Placements{shard});
      EXPECT_EQ(dtensor::avg_pool(images, {{2, 2}}).placements(), Placements{shard});
    }
    // Integers might wrap around; and a gradient depends on which rank's elements are the extremes.
    EXPECT_EQ((on_mesh(indexed({3}).to(at::kByte), mesh, {kMax}) * 2).placements(), Placements{R});
    EXPECT_EQ(dtensor::exp(on_mesh(a, mesh, {kMax}).requires_grad_()).placements(), Placements{R});
  });
}

TEST(DTensorPartialTest, MixedPlacementsOnSeveralMeshDimensions) {
  run_local(4, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2, 2});
    const at::Tensor a = indexed({4, 3}), b = indexed({3}) + 2;
    const at::Tensor square = indexed({4, 4});
    const DTensor strided =
        dtensor::matmul(on_mesh(square, mesh, {S1, S1}), on_mesh(square, mesh, {Placement::strided_shard(0, 2), S0}));
    EXPECT_TRUE(at::allclose(strided.full_tensor(), at::matmul(square, square)));
    const Placements choices = {R, kSum, kAverage, kMax, kMin};
    std::size_t next = 0;
    for (const Placements& of_a : cross(choices, 2)) {
      const DTensor x = on_mesh(a, mesh, of_a);
      EXPECT_TRUE(at::allclose(dtensor::neg(dtensor::exp(x * 0.1) - 3).full_tensor(), 3 - (a * 0.1).exp()))
          << to_string(of_a);
      EXPECT_TRUE(at::allclose(dtensor::amax(x, {0}).full_tensor(), a.amax(0))) << to_string(of_a);
      const std::vector<Placements> all = cross(choices, 2);
      for (std::size_t i = 0; i < 3; ++i) {
        const Placements& of_b = all[(next += 7) % all.size()];
        const DTensor y = on_mesh(b, mesh, of_b);
        EXPECT_TRUE(at::allclose((x * y - y).full_tensor(), a * b - b)) << to_string(of_a) << to_string(of_b);
        EXPECT_TRUE(at::allclose((y - dtensor::maximum(x, y)).full_tensor(), b - at::maximum(a, b)))
            << to_string(of_a) << to_string(of_b);
      }
    }
  });
}

TEST(DTensorPartialTest, ProductsOfPartialTensorsOnMeshesOfManyDimensions) {
  run_local(4, [](const ProcessGroup& group) {
    for (const Sizes& shape : {Sizes{2, 2, 1}, Sizes{1, 2, 2, 1}, Sizes{1, 1, 2, 2, 1}}) {
      const DeviceMesh mesh(group, shape);
      for (const Placement& partial : {kSum, kAverage}) {
        const Placements placements(shape.size(), partial);
        const at::Tensor a = indexed({4, 3}), b = indexed({3, 5});
        const DTensor result = dtensor::matmul(on_mesh(a, mesh, placements), on_mesh(b, mesh, placements));
        for (std::size_t m = 0; m < shape.size(); ++m) {
          EXPECT_TRUE(shape[m] == 1 || result.placements()[m] == partial) << result;
        }
        EXPECT_TRUE(at::allclose(result.full_tensor(), at::matmul(a, b)));
      }
    }
  });
}

TEST(DTensorPartialTest, GradientsOfAveragesAreThoseOfTheFullTensors) {
  const at::Tensor a = indexed({4, 3}).set_requires_grad(true), b = indexed({3}).set_requires_grad(true);
  const auto aten = [](const at::Tensor& x, const at::Tensor& y) {
    return at::matmul(x * y + x / y - y, at::einsum("j,ij->j", {y, x}));
  };
  const auto ours = [](const DTensor& x, const DTensor& y) {
    return dtensor::matmul(x * y + x / y - y, dtensor::einsum("j,ij->j", {y, x}));
  };
  const at::Tensor expected = aten(a, b), weights = indexed({4});
  (expected * weights).sum().backward();
  for (const Sizes& shape : {Sizes{3}, Sizes{2, 2}}) {
    run_local(static_cast<int>(mesh_size(shape)), [&](const ProcessGroup& group) {
      const DeviceMesh mesh(group, shape);
      const std::vector<Placements> all = cross({R, kSum, kAverage}, shape.size());
      std::size_t next = 0;
      for (const Placements& of_a : cross({R, S0, kSum, kAverage}, shape.size())) {
        for (std::size_t i = 0; i < 3; ++i) {
          const Placements& of_b = all[(next += 4 - i % 2) % all.size()];
          const DTensor x = on_mesh(a.detach(), mesh, of_a).requires_grad_(),
                        y = on_mesh(b.detach(), mesh, of_b).requires_grad_();
          const at::Tensor found = ours(x, y).full_tensor();
          ASSERT_TRUE(at::allclose(found, expected)) << to_string(of_a) << to_string(of_b);
          (found * weights).sum().backward();
          ASSERT_TRUE(at::allclose(x.grad()->full_tensor(), a.grad())) << to_string(of_a) << to_string(of_b);
          ASSERT_TRUE(at::allclose(y.grad()->full_tensor(), b.grad())) << to_string(of_a) << to_string(of_b);
        }
      }
    });
  }
}

TEST(DTensorPartialTest, InPlaceAnAverageStaysOne) {
  run_local(2, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2});
    const at::Tensor a = indexed({4, 3}), b = indexed({3}) + 2;
    const DTensor average = on_mesh(a, mesh, {kAverage}), replicated = on_mesh(a, mesh, {R});
    dtensor::add_(average, on_mesh(b, mesh, {R}));
    dtensor::mul_(average, on_mesh(b, mesh, {R}));
    dtensor::sub_(average, 3);
    EXPECT_EQ(average.placements(), Placements{kAverage});
    EXPECT_TRUE(at::allclose(average.full_tensor(), (a + b) * b - 3));
    dtensor::add_(replicated, on_mesh(b, mesh, {kAverage}));
    EXPECT_EQ(replicated.placements(), Placements{R});
    EXPECT_TRUE(at::allclose(replicated.to_local(), a + b));
    dtensor::mul_(average, average);  // the second one is reduced
    EXPECT_TRUE(at::allclose(average.full_tensor(), ((a + b) * b - 3).square()));
    EXPECT_ERROR(dtensor::mul_(on_mesh(a, mesh, {kMax}), average), ErrorCode::unsupported,
                 "would change the placements");
  });
}

TEST(DTensorPartialTest, PlainTensorsAreReplicatedAndGetTheFullGradient) {
  const at::Tensor a = indexed({5, 4}), row = indexed({4});
  for (const Sizes& shape : {Sizes{3}, Sizes{2, 2}}) {
    run_local(static_cast<int>(mesh_size(shape)), [&](const ProcessGroup& group) {
      const DeviceMesh mesh(group, shape);
      for (const Placements& placements : cross({R, S0, S1, kSum}, shape.size())) {
        const DTensor x = on_mesh(a, mesh, placements);
        const at::Tensor plain = row.clone().set_requires_grad(true);
        const at::Tensor found = dtensor::matmul(plain * x - x, plain).full_tensor();
        EXPECT_TRUE(at::allclose(found, at::matmul(row * a - a, row))) << to_string(placements);
        found.sum().backward();
        EXPECT_TRUE(at::allclose(plain.grad(), (2 * row - 1) * a.sum(0))) << to_string(placements);
        EXPECT_EQ((at::ones({1}) + x).size(), (Sizes{5, 4}));
        EXPECT_TRUE(at::equal(dtensor::add_(x, at::ones({}, at::kDouble) * 0).full_tensor(), a));
      }
      if (shape == Sizes{3}) {
        EXPECT_EQ((row + on_mesh(a, mesh, {S0})).placements(), Placements{S0});
        EXPECT_EQ((on_mesh(a, mesh, {S1}) * row).placements(), Placements{S1});
      }
      const DTensor x = on_mesh(a, mesh, Placements(shape.size(), S0));
      EXPECT_ERROR(dtensor::add(row, row), ErrorCode::invalid_argument,
                   "add: only plain tensors, expected at least one DTensor");
      EXPECT_ERROR(x + indexed({3}), ErrorCode::invalid_argument, "add of tensors of sizes [5, 4] and [3]");
      // One rank's mistake is an error on all.
      EXPECT_ERROR(dtensor::sum(x + (group.rank() == 1 ? at::Tensor() : row)).full_tensor(),
                   group.rank() == 1 ? ErrorCode::invalid_argument : ErrorCode::rank_failure, "it is undefined");
    });
  }
}

TEST(DTensorOutTest, TheResultIsWrittenAsTheGivenTensorIsPlaced) {
  const at::Tensor a = indexed({5, 4}), row = indexed({4}) + 2, square = indexed({4, 4});
  for (const Sizes& shape : {Sizes{3}, Sizes{2, 2}}) {
    run_local(static_cast<int>(mesh_size(shape)), [&](const ProcessGroup& group) {
      const DeviceMesh mesh(group, shape);
      const auto choices = cross({R, S0, S1, kSum}, shape.size());
      for (std::size_t i = 0; i < choices.size(); ++i) {
        const Placements &of_out = choices[i], &of_a = choices[i * 7 % choices.size()];
        const DTensor x = on_mesh(a, mesh, of_a), y = on_mesh(row, mesh, cross({R, S0, kSum}, shape.size())[i % 3]),
                      out = on_mesh(at::zeros({5, 4}, at::kDouble), mesh, of_out);
        const at::Tensor local = out.local_tensor();
        const auto check = [&](const DTensor& result, const at::Tensor& expected) {
          EXPECT_EQ(result.placements(), of_out);
          EXPECT_TRUE(result.local_tensor().is_same(local));
          EXPECT_TRUE(at::allclose(out.full_tensor(), expected)) << to_string(of_out) << to_string(of_a);
        };
        check(dtensor::mul_out(out, x, y), a * row);
        check(dtensor::add_out(out, x, y), a + row);
        check(dtensor::sub_out(out, x, row), a - row);
        check(dtensor::div_out(out, x, y), a / row);
        check(dtensor::matmul_out(out, x, square), at::matmul(a, square));
      }
      const DTensor x = on_mesh(a, mesh, Placements(shape.size(), S0));
      EXPECT_ERROR(dtensor::mul_out(on_mesh(a, mesh, Placements(shape.size(), kMax)), x, x), ErrorCode::unsupported,
                   "in place, this would change the placements of the first tensor");
      EXPECT_ERROR(dtensor::mul_out(on_mesh(row, mesh, Placements(shape.size(), R)), x, row),
                   ErrorCode::invalid_argument, "the result would have size [5, 4]");
    });
  }
}

}  // namespace
}  // namespace tessera
