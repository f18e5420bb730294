// Which shards and partial sums the ops on images and on matrices keep, what they refuse, and products of 8-bit floats.

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "support/error_matchers.h"
#include "tensor/mesh_support.h"
#include "tessera/comm/local_ranks.h"
#include "tessera/tensor/dtensor/explicit_redistribution.h"
#include "tessera/tensor/dtensor/op_calls.h"
#include "tessera/tensor/dtensor_factories.h"
#include "tessera/tensor/dtensor_ops.h"
#include "tessera/tensor/dtensor_ops/convolution.h"
#include "tessera/tensor/dtensor_ops/normalization.h"
#include "tessera/tensor/local_shards_wrapper.h"
#include "tessera/tensor/torch_types.h"

namespace tessera {
namespace {

using dtensor::Interpolation;
using testing::indexed;
using testing::on_mesh;
using testing::P;
using testing::R;
using testing::S0;
using testing::S1;
using testing::Sizes;

const Placement kRows = Placement::shard(2), kMean = Placement::partial(ReduceOp::average);

TEST(KeptShardsTest, OfImages) {
  run_local(2, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2});
    const ExplicitRedistributionContext is_explicit;  // refuses what sends elements
    const DTensor grid = on_mesh(indexed({4, 3, 2, 2}) * 0.01, mesh, {R});
    for (const Placement& placement : {S0, S1, P, kMean}) {
      const DTensor images = on_mesh(indexed({4, 2, 3, 3}), mesh, {placement});
      const DTensor of_grid = placement == S0 ? on_mesh(indexed({4, 3, 2, 2}) * 0.01, mesh, {S0}) : grid;
      EXPECT_EQ(dtensor::grid_sampler(images, of_grid).placements(), Placements{placement});
      for (const Interpolation mode : {Interpolation::nearest, Interpolation::nearest_exact, Interpolation::bicubic})
        EXPECT_EQ(dtensor::interpolate(images, {5, 2}, mode).placements(), Placements{placement});
      EXPECT_EQ(dtensor::interpolate(images, {2, 2}, Interpolation::linear, false, true).placements(),
                Placements{placement});
      const DTensor places = distribute_tensor(at::arange(9, at::kLong).view({3, 3}).expand({4, 2, 3, 3}).contiguous(),
                                               mesh, {placement.is_shard() ? placement : R});
      EXPECT_EQ(dtensor::max_unpool(images, places, {4, 4}).placements(), Placements{placement});
      if (!placement.is_shard()) continue;
      const DTensor samples = on_mesh(at::full({4, 2, 2}, 0.5, at::kDouble), mesh, {placement});
      const auto [values, indices] = dtensor::fractional_max_pool(images, {2, 2}, {2, 2}, samples);
      EXPECT_EQ(values.placements(), Placements{placement});
      EXPECT_EQ(indices.placements(), Placements{placement});
    }
    // The places of a grid may be sharded, for images that every rank has.
    const DTensor images = on_mesh(indexed({4, 2, 3, 3}), mesh, {R});
    EXPECT_EQ(dtensor::grid_sampler(images, on_mesh(indexed({4, 3, 2, 2}), mesh, {S1})).placements(),
              Placements{kRows});
    EXPECT_EQ(dtensor::affine_grid_generator(on_mesh(indexed({4, 2, 3}), mesh, {S0}), {4, 1, 5, 5}).placements(),
              Placements{S0});
    EXPECT_EQ(dtensor::affine_grid_generator(on_mesh(indexed({4, 2, 3}), mesh, {P}), {4, 1, 5, 5}).placements(),
              Placements{P});
    // Integers are rounded, so that a sum of results is another one.
    const DTensor bytes = on_mesh(indexed({4, 2, 3, 3}).to(at::kByte), mesh, {R});
    EXPECT_EQ(dtensor::interpolate(bytes, {5, 2}).placements(), Placements{R});
  });
}

TEST(KeptShardsTest, OfMatrices) {
  run_local(2, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2});
    const ExplicitRedistributionContext is_explicit;
    const at::Tensor full = indexed({4, 3, 3}) + at::eye(3, at::kDouble) * 20;
    const DTensor a = on_mesh(full, mesh, {S0}), same = on_mesh(full, mesh, {R});
    const auto [lu, pivots] = dtensor::linalg_lu_factor(a);
    const auto [p, l, u] = dtensor::lu_unpack(lu, pivots);
    const auto [reflections, tau] = dtensor::geqrf(a);
    const auto [ld, rows] = dtensor::linalg_ldl_factor(a);
    for (const DTensor& result : {lu, pivots, p, l, u, reflections, tau, ld, rows, dtensor::linalg_lu(a).u,
                                  dtensor::linalg_householder_product(reflections, tau),
                                  dtensor::ormqr(reflections, tau, a), dtensor::linalg_ldl_solve(ld, rows, a),
                                  dtensor::linalg_lu_solve(lu, pivots, same), dtensor::cholesky_inverse(a)}) {
      EXPECT_EQ(result.placements(), Placements{S0}) << result;
    }
    // Normalization keeps them, and products of groups those of the other dimensions.
    const DTensor images = on_mesh(indexed({4, 2, 3}), mesh, {S0});
    EXPECT_EQ(dtensor::group_norm(images, 1).placements(), Placements{S0});
    EXPECT_EQ(dtensor::grouped_mm(on_mesh(indexed({6, 4}), mesh, {S1}), on_mesh(indexed({2, 4, 5}), mesh, {S1}), {1, 6})
                  .placements(),
              Placements{P});
    // Solutions are linear, and those of each column are independent.
    const auto of_same = dtensor::linalg_lu_factor(same), ldl = dtensor::linalg_ldl_factor(same),
               qr = dtensor::geqrf(same);
    for (const Placement& placement : {P, kMean, kRows}) {
      const DTensor b = on_mesh(indexed({4, 3, 2}), mesh, {placement});
      EXPECT_EQ(dtensor::linalg_lu_solve(of_same.first, of_same.second, b).placements(), Placements{placement});
      EXPECT_EQ(dtensor::linalg_ldl_solve(ldl.first, ldl.second, b).placements(), Placements{placement});
      EXPECT_EQ(dtensor::ormqr(qr.first, qr.second, b).placements(), Placements{placement});
    }
    const DTensor c = on_mesh(indexed({4, 2, 3}), mesh, {S1});
    EXPECT_EQ(dtensor::ormqr(qr.first, qr.second, c, false).placements(), Placements{S1});
  });
}

TEST(KeptShardsTest, AVarianceReducesNoDeviations) {
  run_local(2, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2});
    const DTensor x = on_mesh(indexed({4, 3, 2}), mesh, {S0});
    EXPECT_EQ(dtensor::var(x, {0}).placements(), Placements{P});
    const std::vector<OpCall> calls = record_op_calls([&] {
      dtensor::var(x);
      dtensor::std(x, {0, 1});
      dtensor::batch_norm(x, std::nullopt, std::nullopt, {.training = true});
    });
    int squares = 0;
    for (const OpCall& call : calls) {
      if (call.op != "square") continue;
      EXPECT_EQ(call.inputs, (std::vector<Placements>{{S0}}));
      ++squares;
    }
    EXPECT_EQ(squares, 3);
  });
}

TEST(KeptShardsTest, WhatDoesNotFitIsRefused) {
  run_local(2, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2});
    const auto of = [&](const Sizes& size) { return on_mesh(indexed(size), mesh, {size.empty() ? R : S0}); };
    const auto refused = [](const auto& f, const std::string& text, const std::string& more = "") {
      EXPECT_ERROR(f(), ErrorCode::invalid_argument, text, more);
    };
    const DTensor image = of({4, 2, 3, 3}), matrices = of({4, 3, 3});
    refused(
        [&] {
          return dtensor::grid_sampler(image, of({3, 2, 2, 2}));
        },
        "grid_sampler of tensors of sizes [4, 2, 3, 3] and [3, 2, 2, 2]: expected [n, channels, height, width]");
    refused([&] { return dtensor::grid_sampler(image, of({4, 2, 2, 3})); }, "grid_sampler of tensors");
    refused([&] { return dtensor::grid_sampler(of({4, 3}), of({4, 3})); }, "grid_sampler of tensors");
    refused(
        [&] {
          return dtensor::grid_sampler(image, of({4, 2, 2, 2}), Interpolation::area);
        },
        "grid_sampler: expected nearest, linear or bicubic interpolation");
    refused(
        [&] {
          return dtensor::grid_sampler(of({4, 2, 3, 3, 3}), of({4, 2, 2, 2, 3}), Interpolation::bicubic);
        },
        "expected four dimensions for bicubic");
    refused(
        [&] {
          return dtensor::affine_grid_generator(of({4, 2, 3}), {3, 1, 2, 2});
        },
        "affine_grid_generator of size [4, 2, 3] for images of size [3, 1, 2, 2]");
    refused([&] { return dtensor::affine_grid_generator(of({4, 2, 3}), {}); }, "for images of size []");
    refused(
        [&] {
          return dtensor::interpolate(image, {2, 2}, Interpolation::nearest, true);
        },
        "interpolate with align_corners: expected linear, bicubic or lanczos");
    refused(
        [&] {
          return dtensor::interpolate(image, {2, 2}, Interpolation::area, false, true);
        },
        "interpolate with antialias: expected linear, bicubic or lanczos");
    refused(
        [&] {
          return dtensor::interpolate(of({4, 2, 3}), {2}, Interpolation::linear, false, true);
        },
        "expected four dimensions for antialias");
    refused(
        [&] {
          return dtensor::max_unpool(image, of({4, 2, 3}), {4, 4});
        },
        "max_unpool of tensors of sizes [4, 2, 3, 3] and [4, 2, 3]: expected indices of the size of the first tensor");
    refused([&] { return dtensor::max_unpool(image, image, {4, 4}); }, "max_unpool(DTensor of size");  // not of long
    refused([&] { return dtensor::max_unpool(image, image, {4, 4, 4}); }, "max_unpool with size [4, 4, 4]");
    refused(
        [&] {
          return dtensor::fractional_max_pool(image, {2}, {3}, of({4, 2, 2})).values;
        },
        "fractional_max_pool of size [4, 2, 3, 3] to [3, 3] with a kernel [2, 2]");
    refused(
        [&] {
          return dtensor::fractional_max_pool(image, {2}, {2}, of({4, 2, 2})).values;
        },
        "fractional_max_pool: sample ", " is out of range, expected a number of [0, 1)");
    refused(
        [&] {
          return dtensor::fractional_max_pool(of({4, 2, 3}), {2}, {2}, of({4, 2, 1})).values;
        },
        "expected two or three spatial dimensions");
    refused(
        [&] {
          return dtensor::interpolate(image, {2, 2}, Interpolation::lanczos);
        },
        "interpolate without antialias: expected it for lanczos");
    refused([&] { return dtensor::group_norm(image, 3); },
            "group_norm of size [4, 2, 3, 3] in 3 groups: expected a number that divides the channels");
    refused([&] { return dtensor::group_norm(image, 2, of({3})); },
            "group_norm of tensors of sizes [4, 2, 3, 3] and [3]: expected [n, channels, ...] and parameters of");
    refused([&] { return dtensor::batch_norm(image); }, "with none of running mean and variance: expected both");
    refused(
        [&] {
          return dtensor::batch_norm(image, std::nullopt, std::nullopt, {of({2}), std::nullopt, true});
        },
        "in training, with one of running mean and variance");
    refused(
        [&] {
          return dtensor::batch_norm(of({1, 2}), std::nullopt, std::nullopt, {.training = true});
        },
        "more than one value for each channel in training");
    refused([&] { return dtensor::batch_norm(of({4}), std::nullopt, std::nullopt, {.training = true}); },
            "batch_norm of tensors of sizes [4]");
    for (const Sizes& ends : {Sizes{2, 1, 4}, Sizes{1, 2, 5}, Sizes{1, 2}, Sizes{-1, 0, 4}, Sizes{}}) {
      refused(
          [&] {
            return dtensor::grouped_mm(of({4, 2}), of({3, 2, 5}), ends);
          },
          "grouped_mm of sizes [4, 2] and [3, 2, 5] with ends");
    }
    refused([&] { return dtensor::grouped_mm(matrices, of({4, 3, 2}), {1}); }, "expected two matrices");
    refused([&] { return dtensor::geqrf(of({4})).first; }, "geqrf of size [4]: expected two dimensions or more");
    refused([&] { return dtensor::linalg_ldl_factor(of({4, 3})).first; }, "expected square matrices");
    refused(
        [&] {
          return dtensor::linalg_householder_product(matrices, of({4, 4}));
        },
        "linalg_householder_product of tensors of sizes [4, 3, 3] and [4, 4]: expected [..., m, n] and [..., k], k <= "
        "n");
    refused([&] { return dtensor::linalg_householder_product(of({4, 2, 3}), of({4, 2})); }, "householder_product of");
    refused([&] { return dtensor::linalg_householder_product(matrices, of({})); }, "householder_product of");
    refused(
        [&] {
          return dtensor::ormqr(matrices, of({4, 3}), of({4, 2, 3}));
        },
        "ormqr of tensors of sizes [4, 3, 3] and [4, 3] and [4, 2, 3]: expected [..., m, n], [..., k] and [..., m, ");
    refused([&] { return dtensor::ormqr(matrices, of({4, 3}), of({2, 3, 3})); }, "ormqr of tensors of sizes");
    refused(
        [&] {
          return dtensor::lu_unpack(matrices, of({4, 2})).p;
        },
        "lu_unpack of tensors of sizes [4, 3, 3] and [4, 2]: expected [..., m, n] and pivots [..., k]");
    refused(
        [&] {
          return dtensor::lu_unpack(matrices, dtensor::ones({4, 3}, mesh, {S0}, at::kDouble)).p;
        },
        "lu_unpack(DTensor of size");  // not of int
    refused(
        [&] {
          return dtensor::linalg_lu_solve(matrices, of({4, 3}), of({4, 2, 3}));
        },
        "linalg_lu_solve of tensors of sizes [4, 3, 3] and [4, 3] and [4, 2, 3]: expected [..., n, n], pivots [..., "
        "n]");
    refused(
        [&] {
          return dtensor::linalg_ldl_solve(matrices, of({4, 3}), of({5, 3, 2}));
        },
        "linalg_ldl_solve of tensors of sizes [4, 3, 3] and [4, 3] and [5, 3, 2]: expected batches that broadcast");
    refused([&] { return dtensor::cholesky_inverse(of({4, 3})); }, "cholesky_inverse of size [4, 3]");
    const DTensor beyond = dtensor::to(of({4, 3}), at::kInt);  // as pivots
    refused([&] { return dtensor::lu_unpack(matrices, beyond).p; }, "lu_unpack: pivot ",
            " is out of range, expected 1 to 3");
    refused([&] { return dtensor::linalg_lu_solve(matrices, beyond, matrices); }, "linalg_lu_solve: pivot ",
            " is out of range, expected 1 to 3");
    refused([&] { return dtensor::linalg_ldl_solve(matrices, beyond * -1, matrices); }, "linalg_ldl_solve: pivot ",
            " is out of range, expected 1 to 3");
    refused([&] { return dtensor::interpolate(of({4, 2, 0}), {3}); }, "interpolate of size [4, 2, 0] with 1 lengths");
    refused([&] { return dtensor::mean(beyond); }, "mean of Int: expected a floating-point or complex dtype");
    refused([&] { return dtensor::clamp(image, std::nullopt, std::nullopt); },
            "clamp: neither a minimum nor a maximum");
    const c10::complex<double> number(1, 1);
    refused([&] { return dtensor::masked_fill(image, dtensor::gt(image, 1), number); }, "masked_fill(DTensor of size");
    refused([&] { return dtensor::fill_(image, number); }, "fill_ of Double by a complex number");
    PhiloxGenerator generator(1);
    refused([&] { return dtensor::bernoulli(image, generator); }, "bernoulli: probability ",
            " is out of range, expected 0 to 1");
    refused([&] { return dtensor::dropout(beyond, 0.5, generator); }, "dropout of Int: expected a floating-point");
    refused([&] { return dtensor::frexp(distribute_tensor(at::ones({4}, at::kLong), mesh)).mantissa; },
            "frexp(DTensor of size [4]");
    refused(
        [&] {
          return dtensor::scaled_mm(of({4, 4}), of({4, 4}), at::ones({}), at::ones({}));
        },
        "scaled_mm of size [4, 4] of Double: expected matrices of 8-bit floating-point numbers");
  });
}

// For a LibTorch that has such numbers; 1.13 does not.
TEST(ScaledProductTest, OfEightBitsIsThatOfTheScaledMatrices) {
  at::ScalarType dtype = at::kFloat;
  try {
    dtype = to_scalar_type(DType::float8_e4m3fn);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::unsupported);
    return;
  }
  const at::Tensor a = at::sin(indexed({5, 4})).to(dtype), b = at::cos(indexed({4, 3})).to(dtype);
  const at::Tensor of_rows = indexed({5, 1}).to(at::kFloat), of_columns = indexed({1, 3}).to(at::kFloat);
  for (const auto& [scale_a, scale_b] :
       {std::pair(of_rows, of_columns), std::pair(at::full({}, 2.0F), at::full({}, 0.5F))}) {
    const at::Tensor expected = at::matmul(a.to(at::kFloat) * scale_a, b.to(at::kFloat) * scale_b);
    run_local(2, [&, &scale_a = scale_a, &scale_b = scale_b](const ProcessGroup& group) {
      const DeviceMesh mesh(group, {2});
      for (const Placement& of_a : {R, S0, S1}) {
        for (const Placement& of_b : {R, S0, S1}) {
          const auto placed = [&](const at::Tensor& full, const Placement& placement) {
            const MeshLayout layout(full.sizes().vec(), mesh.shape(), {placement});
            return DTensor(mesh, layout, testing::part_of(full, layout, *mesh.coordinate()));
          };
          const DTensor x = placed(a, of_a), y = placed(b, of_b);
          const DTensor product = dtensor::scaled_mm(x, y, scale_a, scale_b, at::kFloat);
          EXPECT_TRUE(at::allclose(product.full_tensor(), expected, 1e-4, 1e-4));
          const DTensor rounded = dtensor::scaled_mm(x, y, scale_a, scale_b);
          EXPECT_EQ(rounded.scalar_type(), at::kBFloat16);
          EXPECT_TRUE(at::allclose(rounded.full_tensor().to(at::kFloat), expected, 1e-2, 1e-2));
        }
      }
    });
  }
}

}  // namespace
}  // namespace tessera
