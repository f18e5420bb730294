// Linear algebra on DTensors beside that of ATen.

#include <ATen/ATen.h>

#include "tensor/dtensor_ops/op_cases.h"
#include "tessera/tensor/dtensor_ops.h"
#include "tessera/tensor/dtensor_ops/fft.h"

namespace tessera::testing {

namespace {

using Tensors = const std::vector<at::Tensor>&;
using DTensors = const std::vector<DTensor>&;

// From the factors that other ops compute.
std::vector<OpCase> factored_cases() {
  return {
      {"linalg_lu",
       {{4, 3, 3}, {3, 5}},
       [](DTensors v) {
         const auto [lu, pivots] = dtensor::linalg_lu_factor(v[0]);
         const auto [p, l, u] = dtensor::lu_unpack(lu, pivots);
         const auto all = dtensor::linalg_lu(v[0]);
         return dtensor::linalg_lu_solve(lu, pivots, v[1]) +
                dtensor::sum(dtensor::matmul(p, l * 2) + u * all.l + dtensor::matmul(all.p, all.u));
       },
       [](Tensors a) {
         const auto [lu, pivots] = at::linalg_lu_factor(a[0]);
         const auto [p, l, u] = at::lu_unpack(lu, pivots);
         const auto [p2, l2, u2] = at::linalg_lu(a[0]);
         return at::linalg_lu_solve(lu, pivots, a[1].unsqueeze(0)) +
                (at::matmul(p, l * 2) + u * l2 + at::matmul(p2, u2)).sum();
       }},
      {"lu_unpack_of_wide",
       {{5, 2, 3}},
       [](DTensors v) {
         const auto [lu, pivots] = dtensor::linalg_lu_factor(v[0]);
         const auto [p, l, u] = dtensor::lu_unpack(lu, pivots);
         return dtensor::matmul(dtensor::matmul(p, l), dtensor::square(u));
       },
       [](Tensors a) {
         const auto [lu, pivots] = at::linalg_lu_factor(a[0]);
         const auto [p, l, u] = at::lu_unpack(lu, pivots);
         return at::matmul(at::matmul(p, l), u.square());
       }},
      {"householder_product",
       {{4, 3, 2}, {4, 2}},
       [](DTensors v) { return dtensor::linalg_householder_product(v[0], v[1]); },
       [](Tensors a) { return at::linalg_householder_product(a[0], a[1]); }},
      {"reflections",
       {{4, 3, 2}, {4, 3, 5}, {4, 5, 3}},
       [](DTensors v) {
         const auto [a, tau] = dtensor::geqrf(v[0]);
         return dtensor::ormqr(a, tau, v[1]) + dtensor::ormqr(a, tau, v[1], true, true) * 2 +
                dtensor::transpose(dtensor::ormqr(a, tau, v[2], false), 1, 2) +
                dtensor::sum(a) * dtensor::unsqueeze(dtensor::unsqueeze(dtensor::sum(tau, {1}), -1), -1);
       },
       [](Tensors b) {
         const auto [a, tau] = at::geqrf(b[0]);
         return at::ormqr(a, tau, b[1]) + at::ormqr(a, tau, b[1], true, true) * 2 +
                at::ormqr(a, tau, b[2], false).transpose(1, 2) + a.sum() * tau.sum(1).unsqueeze(-1).unsqueeze(-1);
       },
       false},
      {"linalg_ldl",
       {{4, 3, 3}, {3, 5}},
       [](DTensors v) {
         const auto [ld, pivots] = dtensor::linalg_ldl_factor(v[0] + dtensor::transpose(v[0], 1, 2));
         return dtensor::linalg_ldl_solve(ld, pivots, v[1]) +
                dtensor::unsqueeze(dtensor::to(pivots, at::kDouble), -1) * dtensor::sum(ld);
       },
       [](Tensors a) {
         const auto [ld, pivots] = at::linalg_ldl_factor(a[0] + a[0].mT());
         return at::linalg_ldl_solve(ld, pivots, a[1].unsqueeze(0)) + pivots.to(at::kDouble).unsqueeze(-1) * ld.sum();
       },
       false},
      {"cholesky_inverse",
       {{4, 3, 3}},
       [](DTensors v) { return dtensor::cholesky_inverse(v[0]) + dtensor::cholesky_inverse(v[0], true) * 2; },
       [](Tensors a) { return at::cholesky_inverse(a[0]) + at::cholesky_inverse(a[0], true) * 2; }},
  };
}

// Of group i, places ends[i - 1] to ends[i]; the places after the last give 0.
std::vector<OpCase> grouped_cases() {
  const Sizes ends = {2, 2, 5};
  return {
      {"grouped_mm_of_rows",
       {{6, 4}, {3, 4, 5}},
       [=](DTensors v) { return dtensor::grouped_mm(v[0], v[1], ends); },
       [](Tensors a) {
         const at::Tensor first = a[0].narrow(0, 0, 2), last = a[0].narrow(0, 2, 3);
         return at::cat({at::matmul(first, a[1][0]), at::matmul(last, a[1][2]), at::zeros({1, 5}, at::kDouble)});
       }},
      {"grouped_mm_of_columns",
       {{3, 2, 4}, {4, 6}},
       [=](DTensors v) { return dtensor::grouped_mm(v[0], v[1], ends); },
       [](Tensors a) {
         const at::Tensor first = a[1].narrow(1, 0, 2), last = a[1].narrow(1, 2, 3);
         return at::cat({at::matmul(a[0][0], first), at::matmul(a[0][2], last), at::zeros({2, 1}, at::kDouble)}, 1);
       }},
      {"grouped_mm_of_two",
       {{3, 6}, {6, 4}},
       [=](DTensors v) { return dtensor::grouped_mm(v[0], v[1], ends); },
       [](Tensors a) {
         const auto part = [&](std::int64_t begin, std::int64_t length) {
           return at::matmul(a[0].narrow(1, begin, length), a[1].narrow(0, begin, length));
         };
         return at::stack({part(0, 2), part(2, 0), part(2, 3)});
       }},
  };
}

}  // namespace

std::vector<OpCase> linalg_cases() {
  // Positive definite.
  const auto ours = [](const DTensor& x) {
    return dtensor::matmul(x, dtensor::transpose(x, -1, -2)) + at::eye(3, at::kDouble);
  };
  const auto atens = [](const at::Tensor& x) { return at::matmul(x, x.mT()) + at::eye(3, at::kDouble); };
  std::vector<OpCase> cases = {
      {"linalg_of_definite",
       {{4, 3, 3}},
       [=](DTensors v) {
         const DTensor a = ours(v[0]);
         const dtensor::Factors eigen = dtensor::linalg_eigh(a);
         return dtensor::linalg_cholesky(a) + dtensor::linalg_inv(a) * 2 +
                dtensor::matmul(eigen.second * dtensor::unsqueeze(dtensor::log(eigen.first), -2),
                                dtensor::transpose(eigen.second, -1, -2));
       },
       [=](Tensors a) {
         const at::Tensor x = atens(a[0]);
         const auto [values, vectors] = at::linalg_eigh(x);
         return at::linalg_cholesky(x) + at::linalg_inv(x) * 2 +
                at::matmul(vectors * values.log().unsqueeze(-2), vectors.mT());
       }},
      {"linalg_factors",
       {{4, 3, 2}},
       [](DTensors v) {
         const dtensor::Svd svd = dtensor::linalg_svd(v[0], false);
         const dtensor::Factors qr = dtensor::linalg_qr(v[0]);
         return dtensor::matmul(svd.u * dtensor::unsqueeze(dtensor::exp(svd.s), -2), svd.vh) +
                dtensor::matmul(qr.first, dtensor::square(qr.second));
       },
       [](Tensors a) {
         const auto [u, s, vh] = at::linalg_svd(a[0], false);
         const auto [q, r] = at::linalg_qr(a[0]);
         return at::matmul(u * s.exp().unsqueeze(-2), vh) + at::matmul(q, r.square());
       }},
      {"linalg_det",
       {{4, 3, 3}},
       [](DTensors v) { return dtensor::linalg_det(v[0]); },
       [](Tensors a) { return at::linalg_det(a[0]); }},
      {"linalg_slogdet_of_complex",
       {{2, 2, 2, 2}},
       [](DTensors v) { return dtensor::linalg_slogdet(dtensor::view_as_complex(v[0])).second; },
       [](Tensors a) { return std::get<1>(at::linalg_slogdet(at::view_as_complex(a[0]))); }},
      {"linalg_without_gradient",
       {{4, 3, 3}},
       [=](DTensors v) {
         const dtensor::Factors lu = dtensor::linalg_lu_factor(v[0]), eigen = dtensor::linalg_eig(v[0]);
         const dtensor::Svd svd = dtensor::linalg_svd(v[0]);
         return lu.first + dtensor::to(dtensor::unsqueeze(lu.second, -1), at::kDouble) +
                dtensor::unsqueeze(dtensor::abs(eigen.first), -1) * dtensor::abs(eigen.second) +
                dtensor::abs(dtensor::matmul(svd.u, svd.vh)) + dtensor::unsqueeze(svd.s, -1);
       },
       [=](Tensors a) {
         const auto [lu, pivots] = at::linalg_lu_factor(a[0]);
         const auto [values, vectors] = at::linalg_eig(a[0]);
         const auto [u, s, vh] = at::linalg_svd(a[0]);
         return lu + pivots.unsqueeze(-1).to(at::kDouble) + values.abs().unsqueeze(-1) * vectors.abs() +
                at::matmul(u, vh).abs() + s.unsqueeze(-1);
       },
       false},
      {"complex_rotation",
       {{5, 4, 2}, {4, 2}},
       [](DTensors v) {
         const DTensor turn = dtensor::conj_physical(dtensor::view_as_complex(v[1]));
         return dtensor::view_as_real(dtensor::view_as_complex(v[0]) * turn + 1);
       },
       [](Tensors a) {
         const at::Tensor turn = at::conj_physical(at::view_as_complex(a[1]));
         return at::view_as_real(at::view_as_complex(a[0]) * turn + 1);
       }},
      {"linalg_solve",
       {{4, 3, 3}, {3, 5}},
       [=](DTensors v) { return dtensor::linalg_solve(ours(v[0]), v[1]); },
       [=](Tensors a) { return at::linalg_solve(atens(a[0]), a[1].unsqueeze(0)); }},
      {"linalg_of_square",
       {{4, 3, 3}},
       [](DTensors v) {
         const auto [sign, logarithm] = dtensor::linalg_slogdet(v[0]);
         return dtensor::linalg_matrix_exp(v[0] * 0.1) + dtensor::linalg_matrix_power(v[0], 3) * 0.1 +
                dtensor::reshape(logarithm * sign, {4, 1, 1});
       },
       [](Tensors a) {
         const auto [sign, logarithm] = at::linalg_slogdet(a[0]);
         return at::linalg_matrix_exp(a[0] * 0.1) + at::linalg_matrix_power(a[0], 3) * 0.1 +
                (logarithm * sign).reshape({4, 1, 1});
       }},
      {"linalg_pinv",
       {{4, 3, 2}},
       [](DTensors v) { return dtensor::linalg_pinv(v[0]); },
       [](Tensors a) { return at::linalg_pinv(a[0]); }},
      {"linalg_solve_triangular",
       {{4, 3, 3}, {3, 5}},
       [=](DTensors v) {
         const DTensor a = ours(v[0]);
         return dtensor::linalg_solve_triangular(a, v[1], true) + dtensor::linalg_solve_triangular(a, v[1], false) * 2;
       },
       [=](Tensors a) {
         const at::Tensor x = atens(a[0]), b = a[1].unsqueeze(0);
         return at::linalg_solve_triangular(x, b, true) + at::linalg_solve_triangular(x, b, false) * 2;
       }},
      {"cholesky_solve",
       {{4, 3, 3}, {3, 5}},
       [=](DTensors v) { return dtensor::cholesky_solve(v[1], dtensor::linalg_cholesky(ours(v[0]))); },
       [=](Tensors a) { return at::cholesky_solve(a[1].unsqueeze(0), at::linalg_cholesky(atens(a[0]))); }},
      {"triangles",
       {{3, 5, 4}},
       [](DTensors v) {
         return dtensor::tril(v[0]) + dtensor::tril(v[0], -2) * 2 + dtensor::triu(v[0], 1) * 3 +
                dtensor::triu(v[0], -9) * 4 + dtensor::tril(v[0], 9) * 5;
       },
       [](Tensors a) {
         return a[0].tril() + a[0].tril(-2) * 2 + a[0].triu(1) * 3 + a[0].triu(-9) * 4 + a[0].tril(9) * 5;
       }},
      {"diag_embed",
       {{5, 4}},
       [](DTensors v) { return dtensor::diag_embed(v[0], -2) * 2 + dtensor::diag_embed(v[0], 2); },
       [](Tensors a) { return at::diag_embed(a[0], -2) * 2 + at::diag_embed(a[0], 2); }},
      {"linalg_cross",
       {{4, 3}, {4, 3}},
       [](DTensors v) { return dtensor::linalg_cross(v[0], v[1]); },
       [](Tensors a) { return at::linalg_cross(a[0], a[1]); }},
      {"linalg_cross_of_columns",
       {{3, 4}, {3, 1}},
       [](DTensors v) { return dtensor::linalg_cross(v[0], v[1], 0); },
       [](Tensors a) { return at::linalg_cross(a[0], a[1], 0); }},
  };
  for (const auto& more : {factored_cases(), grouped_cases()}) cases.insert(cases.end(), more.begin(), more.end());
  return cases;
}

}  // namespace tessera::testing
