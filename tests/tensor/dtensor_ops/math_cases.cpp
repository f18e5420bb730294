// Functions, order statistics, products and interpolation on DTensors beside those of ATen.

#include <ATen/ATen.h>

#include "tensor/dtensor_ops/op_cases.h"
#include "tessera/tensor/dtensor_ops.h"
#include "tessera/tensor/dtensor_ops/convolution.h"
#include "tessera/tensor/dtensor_ops/fft.h"

namespace tessera::testing {

namespace {

using Tensors = const std::vector<at::Tensor>&;
using DTensors = const std::vector<DTensor>&;

// --- functions by name: the sum of all of a table, each with a factor of its own

using OfOne = std::pair<DTensor (*)(const DTensor&), at::Tensor (*)(const at::Tensor&)>;
using OfTwo = std::pair<DTensor (*)(const dtensor::AnyTensor&, const dtensor::AnyTensor&),
                        at::Tensor (*)(const at::Tensor&, const at::Tensor&)>;
// NOLINTBEGIN(bugprone-macro-parentheses): names are not expressions
#define BOTH(name) \
  { dtensor::name, at::name }
// NOLINTEND(bugprone-macro-parentheses)

// Of 0.2 to 0.8.
std::vector<OfOne> functions() {
  return {BOTH(abs),           BOTH(acos),          BOTH(asin),         BOTH(asinh),
          BOTH(atan),          BOTH(atanh),         BOTH(cos),          BOTH(cosh),
          BOTH(deg2rad),       BOTH(digamma),       BOTH(erf),          BOTH(erfc),
          BOTH(erfinv),        BOTH(exp),           BOTH(exp2),         BOTH(expm1),
          BOTH(frac),          BOTH(hardsigmoid),   BOTH(hardswish),    BOTH(i0),
          BOTH(lgamma),        BOTH(log),           BOTH(log10),        BOTH(log1p),
          BOTH(log2),          BOTH(log_sigmoid),   BOTH(neg),          BOTH(rad2deg),
          BOTH(reciprocal),    BOTH(relu),          BOTH(relu6),        BOTH(rsqrt),
          BOTH(selu),          BOTH(sigmoid),       BOTH(sin),          BOTH(sinc),
          BOTH(sinh),          BOTH(special_entr),  BOTH(special_i0e),  BOTH(special_i1),
          BOTH(special_i1e),   BOTH(special_erfcx), BOTH(special_ndtr), BOTH(special_log_ndtr),
          BOTH(special_ndtri), BOTH(sqrt),          BOTH(square),       BOTH(tan),
          BOTH(tanh)};
}

std::vector<OfOne> functions_without_gradient() {
  return {BOTH(ceil),
          BOTH(floor),
          BOTH(isfinite),
          BOTH(isinf),
          BOTH(isnan),
          BOTH(isneginf),
          BOTH(isposinf),
          BOTH(logical_not),
          BOTH(sgn),
          BOTH(sign),
          BOTH(signbit),
          BOTH(trunc),
          BOTH(special_airy_ai),
          BOTH(special_bessel_j0),
          BOTH(special_bessel_j1),
          BOTH(special_bessel_y0),
          BOTH(special_bessel_y1),
          BOTH(special_modified_bessel_i0),
          BOTH(special_modified_bessel_i1),
          BOTH(special_modified_bessel_k0),
          BOTH(special_modified_bessel_k1),
          BOTH(special_scaled_modified_bessel_k0),
          BOTH(special_scaled_modified_bessel_k1),
          BOTH(special_spherical_bessel_j0),
          BOTH(round),
          BOTH(angle)};
}

std::vector<OfTwo> functions_of_two() {
  return {BOTH(atan2), BOTH(copysign),  BOTH(fmax),       BOTH(fmin),  BOTH(hypot),
          BOTH(ldexp), BOTH(logaddexp), BOTH(logaddexp2), BOTH(xlogy), BOTH(special_xlog1py),
          BOTH(pow),   BOTH(fmod),      BOTH(remainder)};
}

std::vector<OfTwo> functions_of_two_without_gradient() {
  return {BOTH(float_power),
          BOTH(floor_divide),
          BOTH(heaviside),
          BOTH(igamma),
          BOTH(igammac),
          BOTH(logical_and),
          BOTH(logical_or),
          BOTH(logical_xor),
          BOTH(special_zeta),
          BOTH(special_chebyshev_polynomial_t),
          BOTH(special_chebyshev_polynomial_u),
          BOTH(special_chebyshev_polynomial_v),
          BOTH(special_chebyshev_polynomial_w),
          BOTH(special_hermite_polynomial_h),
          BOTH(special_hermite_polynomial_he),
          BOTH(special_laguerre_polynomial_l),
          BOTH(special_legendre_polynomial_p),
          BOTH(special_shifted_chebyshev_polynomial_t),
          BOTH(special_shifted_chebyshev_polynomial_u),
          BOTH(special_shifted_chebyshev_polynomial_v),
          BOTH(special_shifted_chebyshev_polynomial_w)};
}

// Of integers.
std::vector<OfTwo> functions_of_bits() {
  return {BOTH(bitwise_and),         BOTH(bitwise_or), BOTH(bitwise_xor), BOTH(bitwise_left_shift),
          BOTH(bitwise_right_shift), BOTH(gcd),        BOTH(lcm)};
}

#undef BOTH

template <typename Table>
DTensor sum_of(const Table& table, const DTensor& x) {
  DTensor all = x;
  for (std::size_t i = 0; i < table.size(); ++i)
    all = all + dtensor::to(table[i].first(x), at::kDouble) * (1 + 0.1 * static_cast<double>(i));
  return all;
}
template <typename Table>
at::Tensor sum_of(const Table& table, const at::Tensor& x) {
  at::Tensor all = x;
  for (std::size_t i = 0; i < table.size(); ++i)
    all = all + table[i].second(x).to(at::kDouble) * (1 + 0.1 * static_cast<double>(i));
  return all;
}
DTensor sum_of(const std::vector<OfTwo>& table, const DTensor& x, const DTensor& y) {
  DTensor all = x;
  for (std::size_t i = 0; i < table.size(); ++i)
    all = all + dtensor::to(table[i].first(x, y), at::kDouble) * (1 + 0.1 * static_cast<double>(i));
  return all;
}
at::Tensor sum_of(const std::vector<OfTwo>& table, const at::Tensor& x, const at::Tensor& y) {
  at::Tensor all = x;
  for (std::size_t i = 0; i < table.size(); ++i)
    all = all + table[i].second(x, y).to(at::kDouble) * (1 + 0.1 * static_cast<double>(i));
  return all;
}

std::vector<OpCase> function_cases() {
  return {
      {"functions",
       {{5, 4}},
       [](DTensors v) {
         return sum_of(functions(), v[0] * 0.3) + dtensor::acosh(v[0] + 1) + dtensor::mvlgamma(v[0] + 3, 2);
       },
       [](Tensors a) { return sum_of(functions(), a[0] * 0.3) + at::acosh(a[0] + 1) + at::mvlgamma(a[0] + 3, 2); }},
      {"frexp",
       {{5, 4}},
       [](DTensors v) {
         const auto [mantissa, exponent] = dtensor::frexp(v[0] * 3);
         return dtensor::square(mantissa) + dtensor::to(exponent, at::kDouble) * 2;
       },
       [](Tensors a) {
         const auto [mantissa, exponent] = at::frexp(a[0] * 3);
         return mantissa.square() + exponent.to(at::kDouble) * 2;
       }},
      {"rrelu",
       {{5, 4}},
       [](DTensors v) { return dtensor::rrelu(v[0] - 1.5) + dtensor::rrelu(v[0] - 1.5, -0.5, 0.1); },
       [](Tensors a) { return at::rrelu(a[0] - 1.5) + at::rrelu(a[0] - 1.5, -0.5, 0.1); }},
      {"functions_without_gradient",
       {{5, 4}},
       [](DTensors v) {
         return sum_of(functions_without_gradient(), v[0]) +
                dtensor::to(dtensor::bitwise_not(dtensor::gt(v[0], 1)), at::kDouble);
       },
       [](Tensors a) {
         return sum_of(functions_without_gradient(), a[0]) + at::bitwise_not(a[0].gt(1)).to(at::kDouble);
       },
       false},
      {"functions_of_two",
       {{5, 4}, {4}},
       [](DTensors v) { return sum_of(functions_of_two(), v[0], v[1]); },
       [](Tensors a) { return sum_of(functions_of_two(), a[0], a[1]); }},
      {"functions_of_two_without_gradient",
       {{5, 4}, {4}},
       [](DTensors v) {
         return sum_of(functions_of_two_without_gradient(), v[0] + 1, v[1]) +
                dtensor::to(dtensor::nextafter(v[0], v[1]), at::kDouble) +
                dtensor::to(dtensor::isclose(v[0], v[1], 0.3), at::kDouble);
       },
       [](Tensors a) {
         return sum_of(functions_of_two_without_gradient(), a[0] + 1, a[1]) + at::nextafter(a[0], a[1]) +
                at::isclose(a[0], a[1], 0.3).to(at::kDouble);
       },
       false},
      {"functions_of_bits",
       {{5, 4}, {4}},
       [](DTensors v) {
         return sum_of(functions_of_bits(), dtensor::to(v[0] * 10, at::kLong), dtensor::to(v[1] * 3, at::kLong));
       },
       [](Tensors a) { return sum_of(functions_of_bits(), (a[0] * 10).to(at::kLong), (a[1] * 3).to(at::kLong)); },
       false},
      {"activations_with_options",
       {{5, 4}},
       [](DTensors v) {
         const DTensor x = v[0] - 1.5;
         return dtensor::celu(x, 0.7) + dtensor::elu(x, 1.3) + dtensor::hardshrink(x, 0.4) +
                dtensor::hardtanh(x, -0.3, 0.6) + dtensor::leaky_relu(x, 0.2) + dtensor::logit(v[0] * 0.3) +
                dtensor::logit(v[0], 0.1) + dtensor::polygamma(1, v[0]) + dtensor::softplus(x, 2, 1.5) +
                dtensor::softshrink(x, 0.2) + dtensor::threshold(x, 0.1, -2) + dtensor::mish(x);
       },
       [](Tensors a) {
         const at::Tensor x = a[0] - 1.5;
         return at::celu(x, 0.7) + at::elu(x, 1.3) + at::hardshrink(x, 0.4) + at::hardtanh(x, -0.3, 0.6) +
                at::leaky_relu(x, 0.2) + at::logit(a[0] * 0.3) + at::logit(a[0], 0.1) + at::polygamma(1, a[0]) +
                at::softplus(x, 2, 1.5) + at::softshrink(x, 0.2) + at::threshold(x, 0.1, -2) + at::mish(x);
       }},
      {"of_three",
       {{5, 4}, {4}, {5, 1}},
       [](DTensors v) {
         return dtensor::lerp(v[0], v[1], v[2]) + dtensor::addcmul(v[1], v[0], v[2], 0.5) +
                dtensor::addcdiv(v[2], v[0], v[1], 2);
       },
       [](Tensors a) {
         return at::lerp(a[0], a[1], a[2]) + at::addcmul(a[1], a[0], a[2], 0.5) + at::addcdiv(a[2], a[0], a[1], 2);
       }},
      {"plain_tensors",
       {{5, 4}},
       [](DTensors v) {
         const at::Tensor row = at::arange(4, at::kDouble), one = at::full({}, 2.0, at::kDouble);
         const DTensor sums = row + v[0] * row - one / v[0];
         return dtensor::matmul(dtensor::where(dtensor::gt(row, v[0]), one, sums), row.unsqueeze(1)) +
                dtensor::masked_fill(v[0], row.gt(2), 7);
       },
       [](Tensors a) {
         const at::Tensor row = at::arange(4, at::kDouble), one = at::full({}, 2.0, at::kDouble);
         const at::Tensor sums = row + a[0] * row - one / a[0];
         return at::matmul(at::where(row.gt(a[0]), one, sums), row.unsqueeze(1)) + a[0].masked_fill(row.gt(2), 7);
       }},
  };
}

// --- order statistics and scans

std::vector<OpCase> order_cases() {
  const auto number = [](const DTensor& x) { return dtensor::to(x, at::kDouble); };
  return {
      {"scans",
       {{5, 4}},
       [](DTensors v) {
         return dtensor::logcumsumexp(v[0], 0) + dtensor::cummax(v[0], 0).values * dtensor::cummin(v[0], 1).values;
       },
       [](Tensors a) {
         return at::logcumsumexp(a[0], 0) + std::get<0>(at::cummax(a[0], 0)) * std::get<0>(at::cummin(a[0], 1));
       }},
      {"places_of_scans",
       {{5, 4}},
       [=](DTensors v) {
         return number(dtensor::cummax(v[0], 0).indices) * 10 + number(dtensor::cummin(v[0], -1).indices);
       },
       [](Tensors a) {
         return std::get<1>(at::cummax(a[0], 0)).to(at::kDouble) * 10 +
                std::get<1>(at::cummin(a[0], -1)).to(at::kDouble);
       },
       false},
      {"medians",
       {{5, 4}},
       [](DTensors v) {
         return dtensor::median(v[0], 0).values + dtensor::kthvalue(v[0], 2, 0).values * 2 +
                dtensor::nanmedian(v[0], -2).values * 3 + dtensor::mode(dtensor::round(v[0] * 2), 0).values +
                dtensor::median(v[0]) * dtensor::nanmedian(v[0] * 2) +
                dtensor::squeeze(dtensor::median(v[0], 0, true).values, 0);
       },
       [](Tensors a) {
         return std::get<0>(at::median(a[0], 0)) + std::get<0>(at::kthvalue(a[0], 2, 0)) * 2 +
                std::get<0>(at::nanmedian(a[0], -2)) * 3 + std::get<0>(at::mode(at::round(a[0] * 2), 0)) +
                at::median(a[0]) * at::nanmedian(a[0] * 2) + std::get<0>(at::median(a[0], 0));
       }},
      {"places_of_medians",
       {{5, 4}},
       [=](DTensors v) {
         const DTensor steps = dtensor::round(v[0] * 2);
         return number(dtensor::median(v[0], 1).indices) + number(dtensor::kthvalue(v[0], 3, 1).indices) * 10 +
                number(dtensor::nanmedian(v[0], 1).indices) * 100 + number(dtensor::mode(steps, 1).indices) * 1000 +
                number(dtensor::argmax(v[0])) * 1e4 + number(dtensor::argmin(v[0])) * 1e6;
       },
       [](Tensors a) {
         const auto places = [](const std::tuple<at::Tensor, at::Tensor>& both) {
           return std::get<1>(both).to(at::kDouble);
         };
         return places(at::median(a[0], 1)) + places(at::kthvalue(a[0], 3, 1)) * 10 +
                places(at::nanmedian(a[0], 1)) * 100 + places(at::mode(at::round(a[0] * 2), 1)) * 1000 +
                at::argmax(a[0]).to(at::kDouble) * 1e4 + at::argmin(a[0]).to(at::kDouble) * 1e6;
       },
       false},
      {"nansum",
       {{5, 4}},
       [](DTensors v) {
         const DTensor x = dtensor::masked_fill(v[0], dtensor::gt(v[0], 1.9), NAN);
         return dtensor::nansum(x) * dtensor::nansum(x, {0}) + dtensor::sum(dtensor::nansum(x, {1}, true)) +
                dtensor::nanmedian(x);
       },
       [](Tensors a) {
         const at::Tensor x = a[0].masked_fill(a[0].gt(1.9), NAN);
         return at::nansum(x) * at::nansum(x, at::IntArrayRef{0}) + at::nansum(x) + at::nanmedian(x);
       }},
      {"histc",
       {{5, 4}},
       [](DTensors v) { return dtensor::histc(v[0], 7, 0.8, 2) * 100 + dtensor::histc(v[0], 7); },
       [](Tensors a) { return at::histc(a[0], 7, 0.8, 2) * 100 + at::histc(a[0], 7); },
       false},
      {"powsum",
       {{5, 4}},
       [](DTensors v) {
         const DTensor x = v[0] - 1.5;
         return dtensor::powsum(x, 1, {0}) + dtensor::powsum(x, 2, {0}) * dtensor::powsum(x, 3) +
                dtensor::powsum(dtensor::clamp(x, 0, 9), 0, {0});
       },
       [](Tensors a) {
         const at::Tensor x = a[0] - 1.5;
         return x.abs().sum(0) + x.square().sum(0) * x.abs().pow(3).sum() + x.gt(0).sum(0);
       }},
  };
}

// --- products

std::vector<OpCase> einsum_cases() {
  const auto einsum = [](const std::string& name, const std::string& equation, const std::vector<Sizes>& sizes) {
    return OpCase{name, sizes, [=](DTensors v) { return dtensor::einsum(equation, v); },
                  [=](Tensors a) { return at::einsum(equation, a); }};
  };
  return {
      einsum("einsum_of_three", "ij, jk, k -> i", {{3, 4}, {4, 2}, {2}}),
      einsum("einsum_batches", "bij,bkj->bki", {{3, 2, 4}, {3, 5, 4}}),
      einsum("einsum_diagonal", "iij->ji", {{3, 3, 4}}),
      einsum("einsum_ellipsis", "...ij,jk", {{2, 3, 4}, {4, 2}}),
      einsum("einsum_summed_alone", "ij,k->", {{3, 4}, {2}}),
      einsum("einsum_of_places", "ij,ij->ij", {{3, 4}, {3, 4}}),
      {"tensordot",
       {{4, 3}, {4, 5}},
       [](DTensors v) { return dtensor::tensordot(v[0], v[1], {0}, {0}); },
       [](Tensors a) { return at::tensordot(a[0], a[1], {0}, {0}); }},
      {"tensordot_of_two",
       {{2, 4, 3}, {3, 2, 5}},
       [](DTensors v) {
         return dtensor::tensordot(v[0], v[1], {0, -1}, {1, 0});
       },
       [](Tensors a) {
         return at::tensordot(a[0], a[1], {0, -1}, {1, 0});
       }},
      {"addmm_of_matrix",
       {{5, 3}, {5, 4}, {4, 3}},
       [](DTensors v) { return dtensor::addmm(v[0], v[1], v[2], 0.8, 0.5); },
       [](Tensors a) { return at::addmm(a[0], a[1], a[2], 0.8, 0.5); }},
      {"addmm_of_column",
       {{5, 1}, {5, 4}, {4, 3}},
       [](DTensors v) { return dtensor::addmm(v[0], v[1], v[2]); },
       [](Tensors a) { return at::addmm(a[0], a[1], a[2]); }},
      {"baddbmm",
       {{4, 3, 2}, {4, 3, 5}, {4, 5, 2}},
       [](DTensors v) { return dtensor::addmm(v[0], v[1], v[2], 0.8, 0.5) + dtensor::addmm(v[0], v[1], v[2], 0); },
       [](Tensors a) { return at::baddbmm(a[0], a[1], a[2], 0.8, 0.5) + at::bmm(a[1], a[2]); }},
      {"addmm_without_x",
       {{5, 3}, {5, 4}, {4, 3}},
       [](DTensors v) { return dtensor::addmm(dtensor::log(v[0] * 0 - 1), v[1], v[2], 0); },
       [](Tensors a) { return at::mm(a[1], a[2]); },
       false},
      {"addmm_of_nothing",
       {{4}, {5, 0}, {0, 4}},
       [](DTensors v) { return dtensor::addmm(v[0], v[1], v[2]); },
       [](Tensors a) { return at::addmm(a[0], a[1], a[2]); }},
      {"t",
       {{5, 4}, {4}},
       [](DTensors v) { return dtensor::matmul(dtensor::t(dtensor::t(v[0])), dtensor::t(v[1])); },
       [](Tensors a) { return at::matmul(a[0].t().t(), a[1].t()); }},
  };
}

// --- interpolation and pooling

std::vector<OpCase> interpolation_cases() {
  using dtensor::Interpolation;
  const dtensor::PoolingOptions of_one{{3}, {2}, {1}}, of_two{{2, 3}, {}, {1, 0}}, of_three{{2, 2, 1}, {1, 2, 1}};
  return {
      {"interpolation_of_one",
       {{4, 2, 5}},
       [](DTensors v) {
         return dtensor::interpolate(v[0], {8}, Interpolation::linear, true) + dtensor::interpolate(v[0], {8}) +
                dtensor::interpolate(v[0], {8}, Interpolation::area) +
                dtensor::interpolate(v[0], {8}, Interpolation::nearest_exact) * 2;
       },
       [](Tensors a) {
         return at::upsample_linear1d(a[0], {8}, true) + at::upsample_nearest1d(a[0], {8}) +
                at::adaptive_avg_pool1d(a[0], {8}) + at::_upsample_nearest_exact1d(a[0], {8}) * 2;
       }},
      {"interpolation_of_two",
       {{2, 3, 4, 3}},
       [](DTensors v) {
         return dtensor::interpolate(v[0], {6, 5}, Interpolation::linear) + dtensor::interpolate(v[0], {6, 5}) +
                dtensor::interpolate(v[0], {6, 5}, Interpolation::bicubic, true) +
                dtensor::interpolate(v[0], {6, 5}, Interpolation::area) +
                dtensor::interpolate(v[0], {6, 5}, Interpolation::nearest_exact) * 2;
       },
       [](Tensors a) {
         return at::upsample_bilinear2d(a[0], {6, 5}, false) + at::upsample_nearest2d(a[0], {6, 5}) +
                at::upsample_bicubic2d(a[0], {6, 5}, true) + at::adaptive_avg_pool2d(a[0], {6, 5}) +
                at::_upsample_nearest_exact2d(a[0], {6, 5}) * 2;
       }},
      {"interpolation_with_antialias",
       {{2, 3, 5, 4}},
       [](DTensors v) {
         return dtensor::interpolate(v[0], {3, 2}, Interpolation::linear, false, true) +
                dtensor::interpolate(v[0], {3, 2}, Interpolation::bicubic, true, true) * 2;
       },
       [](Tensors a) {
         return at::_upsample_bilinear2d_aa(a[0], {3, 2}, false) + at::_upsample_bicubic2d_aa(a[0], {3, 2}, true) * 2;
       }},
      {"interpolation_of_three",
       {{3, 2, 2, 3, 2}},
       [](DTensors v) {
         return dtensor::interpolate(v[0], {4, 4, 3}, Interpolation::linear, true) +
                dtensor::interpolate(v[0], {4, 4, 3}) + dtensor::adaptive_avg_pool(v[0], {4, 4, 3}) +
                dtensor::interpolate(v[0], {4, 4, 3}, Interpolation::nearest_exact) * 2;
       },
       [](Tensors a) {
         return at::upsample_trilinear3d(a[0], {4, 4, 3}, true) + at::upsample_nearest3d(a[0], {4, 4, 3}) +
                at::adaptive_avg_pool3d(a[0], {4, 4, 3}) + at::_upsample_nearest_exact3d(a[0], {4, 4, 3}) * 2;
       }},
      {"pooling_of_one",
       {{4, 2, 7}},
       [=](DTensors v) { return dtensor::avg_pool(v[0], of_one) + dtensor::max_pool(v[0], of_one); },
       [](Tensors a) { return at::avg_pool1d(a[0], {3}, {2}, {1}) + at::max_pool1d(a[0], {3}, {2}, {1}); }},
      {"pooling_of_two",
       {{2, 3, 4, 6}},
       [=](DTensors v) { return dtensor::avg_pool(v[0], of_two) + dtensor::max_pool(v[0], of_two); },
       [](Tensors a) {
         return at::avg_pool2d(a[0], {2, 3}, {2, 3}, {1, 0}) + at::max_pool2d(a[0], {2, 3}, {2, 3}, {1, 0});
       }},
      {"pooling_of_three",
       {{3, 2, 3, 4, 2}},
       [=](DTensors v) { return dtensor::avg_pool(v[0], of_three) + dtensor::max_pool(v[0], of_three); },
       [](Tensors a) {
         return at::avg_pool3d(a[0], {2, 2, 1}, {1, 2, 1}) + at::max_pool3d(a[0], {2, 2, 1}, {1, 2, 1});
       }},
  };
}

}  // namespace

std::vector<OpCase> math_cases() {
  std::vector<OpCase> all;
  for (const auto& more : {function_cases(), order_cases(), einsum_cases(), linalg_cases(), interpolation_cases()})
    all.insert(all.end(), more.begin(), more.end());
  return all;
}

}  // namespace tessera::testing
