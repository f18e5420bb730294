#pragma once
/// \file
/// The built-in ops on DTensors, with ATen's names.
///
/// Each returns the result of the ATen function of its name on the full tensors. In half precision, means, variances
/// and norms are summed in float. An op marked "linear" takes partial inputs (sum or average) without reducing them
/// first. All are collectives of the mesh's ranks. They throw as `call` does.
///
/// `register_placement_rule` replaces the rule of an op, by its name ("relu"). The ops on sharded tensors
/// (tessera/tensor/ops.h) overload with these. PyTorch: torch/distributed/tensor/_ops.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "tessera/tensor/dtensor.h"
#include "tessera/tensor/dtensor_ops/indexing.h"
#include "tessera/tensor/dtensor_ops/linalg.h"
#include "tessera/tensor/dtensor_ops/spatial.h"
#include "tessera/tensor/philox_generator.h"

namespace tessera::dtensor {

/// A tensor that an op takes: a DTensor, or a plain tensor, which counts as replicated on the mesh of the op's first
/// DTensor. A plain tensor must be equal on all ranks, which is not checked; it gets the gradient of the full tensor.
/// At least one tensor of a call must be a DTensor.
///
/// PyTorch refuses plain tensors of more than one element outside of a scope, `implicit_replication`, since in Python
/// any call takes either type. Here the signature of an op states what it takes, so no mode of the thread is needed;
/// where an op takes DTensors only, `DTensor::from_local(tensor, mesh)` replicates a tensor.
class AnyTensor {
 public:
  AnyTensor(DTensor tensor) : tensor_(std::move(tensor)) {}                  // NOLINT(google-explicit-constructor)
  AnyTensor(at::Tensor tensor) : tensor_(std::move(tensor)) {}               // NOLINT(google-explicit-constructor)
  const DTensor* dtensor() const { return std::get_if<DTensor>(&tensor_); }  ///< null if it is plain
  const at::Tensor& plain() const { return std::get<at::Tensor>(tensor_); }

 private:
  std::variant<DTensor, at::Tensor> tensor_;
};

// --- element by element. An op marked "increasing" takes partial maxima and minima without reducing them first, if
// their dtype is a floating-point one and they do not require grad.

DTensor abs(const DTensor& x);
DTensor acos(const DTensor& x);
DTensor acosh(const DTensor& x);
DTensor angle(const DTensor& x);
DTensor asin(const DTensor& x);
DTensor asinh(const DTensor& x);  ///< increasing
DTensor atan(const DTensor& x);   ///< increasing
DTensor atanh(const DTensor& x);
DTensor bitwise_not(const DTensor& x);
DTensor ceil(const DTensor& x);   ///< increasing
DTensor clone(const DTensor& x);  ///< linear, and for every kind of partial
DTensor conj_physical(const DTensor& x);
DTensor cos(const DTensor& x);
DTensor cosh(const DTensor& x);
DTensor deg2rad(const DTensor& x);  ///< linear, increasing
DTensor digamma(const DTensor& x);
DTensor erf(const DTensor& x);  ///< increasing
DTensor erfc(const DTensor& x);
DTensor erfinv(const DTensor& x);
DTensor exp(const DTensor& x);    ///< increasing
DTensor exp2(const DTensor& x);   ///< increasing
DTensor expm1(const DTensor& x);  ///< increasing
DTensor floor(const DTensor& x);  ///< increasing
DTensor frac(const DTensor& x);
DTensor gelu(const DTensor& x);
DTensor hardsigmoid(const DTensor& x);  ///< increasing
DTensor hardswish(const DTensor& x);
DTensor i0(const DTensor& x);
DTensor isfinite(const DTensor& x);
DTensor isinf(const DTensor& x);
DTensor isnan(const DTensor& x);
DTensor isneginf(const DTensor& x);
DTensor isposinf(const DTensor& x);
DTensor lgamma(const DTensor& x);
DTensor log(const DTensor& x);
DTensor log10(const DTensor& x);
DTensor log1p(const DTensor& x);
DTensor log2(const DTensor& x);
DTensor log_sigmoid(const DTensor& x);  ///< increasing
DTensor logical_not(const DTensor& x);
DTensor mish(const DTensor& x);
DTensor neg(const DTensor& x);      ///< linear; a partial maximum becomes a partial minimum
DTensor rad2deg(const DTensor& x);  ///< linear, increasing
DTensor reciprocal(const DTensor& x);
DTensor relu(const DTensor& x);   ///< increasing
DTensor relu6(const DTensor& x);  ///< increasing
DTensor round(const DTensor& x);  ///< increasing
DTensor rsqrt(const DTensor& x);
DTensor selu(const DTensor& x);  ///< increasing
DTensor sgn(const DTensor& x);
DTensor sigmoid(const DTensor& x);  ///< increasing
DTensor sign(const DTensor& x);     ///< increasing
DTensor signbit(const DTensor& x);
DTensor silu(const DTensor& x);
DTensor sin(const DTensor& x);
DTensor sinc(const DTensor& x);
DTensor sinh(const DTensor& x);  ///< increasing
DTensor special_airy_ai(const DTensor& x);
DTensor special_bessel_j0(const DTensor& x);
DTensor special_bessel_j1(const DTensor& x);
DTensor special_bessel_y0(const DTensor& x);
DTensor special_bessel_y1(const DTensor& x);
DTensor special_entr(const DTensor& x);
DTensor special_erfcx(const DTensor& x);
DTensor special_i0e(const DTensor& x);
DTensor special_i1(const DTensor& x);
DTensor special_i1e(const DTensor& x);
DTensor special_log_ndtr(const DTensor& x);
DTensor special_modified_bessel_i0(const DTensor& x);
DTensor special_modified_bessel_i1(const DTensor& x);
DTensor special_modified_bessel_k0(const DTensor& x);
DTensor special_modified_bessel_k1(const DTensor& x);
DTensor special_ndtr(const DTensor& x);  ///< increasing
DTensor special_ndtri(const DTensor& x);
DTensor special_scaled_modified_bessel_k0(const DTensor& x);
DTensor special_scaled_modified_bessel_k1(const DTensor& x);
DTensor special_spherical_bessel_j0(const DTensor& x);
DTensor sqrt(const DTensor& x);
DTensor square(const DTensor& x);
DTensor tan(const DTensor& x);
DTensor tanh(const DTensor& x);   ///< increasing
DTensor trunc(const DTensor& x);  ///< increasing

// With options, as in torch::nn::functional.
DTensor clamp(const DTensor& x, const std::optional<at::Scalar>& min,
              const std::optional<at::Scalar>& max);  ///< increasing
DTensor to(const DTensor& x, at::ScalarType dtype);   ///< linear, increasing if `dtype` has every value of x's and is a
                                                      ///< floating-point one
DTensor celu(const DTensor& x, const at::Scalar& alpha = 1);
DTensor elu(const DTensor& x, const at::Scalar& alpha = 1);
DTensor hardshrink(const DTensor& x, const at::Scalar& lambda = 0.5);
DTensor hardtanh(const DTensor& x, const at::Scalar& min = -1, const at::Scalar& max = 1);  ///< increasing
DTensor leaky_relu(const DTensor& x, const at::Scalar& slope = 0.01);
DTensor logit(const DTensor& x, std::optional<double> eps = std::nullopt);
DTensor mvlgamma(const DTensor& x, std::int64_t p);
DTensor nan_to_num(const DTensor& x, double nan = 0);
DTensor polygamma(std::int64_t n, const DTensor& x);
DTensor softplus(const DTensor& x, const at::Scalar& beta = 1, const at::Scalar& threshold = 20);
DTensor softshrink(const DTensor& x, const at::Scalar& lambda = 0.5);
/// Replaces the elements that are not greater than `least`.
DTensor threshold(const DTensor& x, const at::Scalar& least, const at::Scalar& value);

struct MantissaAndExponent {
  DTensor mantissa, exponent;
};
/// Returns x as mantissa * 2^exponent. The mantissa is 0 or 0.5 <= |mantissa| < 1; the exponent has dtype int.
MantissaAndExponent frexp(const DTensor& x);

// Both tensors are broadcast to a common size.
DTensor add(const AnyTensor& a,
            const AnyTensor& b);  ///< linear; keeps partial maxima and minima if the other is replicated
DTensor sub(const AnyTensor& a, const AnyTensor& b);      ///< as add
DTensor mul(const AnyTensor& a, const AnyTensor& b);      ///< linear in each
DTensor div(const AnyTensor& a, const AnyTensor& b);      ///< linear in a
DTensor maximum(const AnyTensor& a, const AnyTensor& b);  ///< of partial maxima without reducing them
DTensor minimum(const AnyTensor& a, const AnyTensor& b);  ///< of partial minima without reducing them
DTensor atan2(const AnyTensor& a, const AnyTensor& b);
DTensor bitwise_and(const AnyTensor& a, const AnyTensor& b);
DTensor bitwise_left_shift(const AnyTensor& a, const AnyTensor& b);
DTensor bitwise_or(const AnyTensor& a, const AnyTensor& b);
DTensor bitwise_right_shift(const AnyTensor& a, const AnyTensor& b);
DTensor bitwise_xor(const AnyTensor& a, const AnyTensor& b);
DTensor copysign(const AnyTensor& a, const AnyTensor& b);
DTensor float_power(const AnyTensor& a, const AnyTensor& b);
DTensor floor_divide(const AnyTensor& a, const AnyTensor& b);
DTensor fmax(const AnyTensor& a, const AnyTensor& b);
DTensor fmin(const AnyTensor& a, const AnyTensor& b);
DTensor fmod(const AnyTensor& a, const AnyTensor& b);
DTensor gcd(const AnyTensor& a, const AnyTensor& b);
DTensor heaviside(const AnyTensor& a, const AnyTensor& b);
DTensor hypot(const AnyTensor& a, const AnyTensor& b);
DTensor igamma(const AnyTensor& a, const AnyTensor& b);
DTensor igammac(const AnyTensor& a, const AnyTensor& b);
DTensor lcm(const AnyTensor& a, const AnyTensor& b);
DTensor ldexp(const AnyTensor& a, const AnyTensor& b);
DTensor logaddexp(const AnyTensor& a, const AnyTensor& b);
DTensor logaddexp2(const AnyTensor& a, const AnyTensor& b);
DTensor logical_and(const AnyTensor& a, const AnyTensor& b);
DTensor logical_or(const AnyTensor& a, const AnyTensor& b);
DTensor logical_xor(const AnyTensor& a, const AnyTensor& b);
DTensor nextafter(const AnyTensor& a, const AnyTensor& b);
DTensor pow(const AnyTensor& a, const AnyTensor& exponent);
DTensor remainder(const AnyTensor& a, const AnyTensor& b);
DTensor special_xlog1py(const AnyTensor& a, const AnyTensor& b);
DTensor special_zeta(const AnyTensor& a, const AnyTensor& b);
DTensor xlogy(const AnyTensor& a, const AnyTensor& b);
// Polynomials of degree n, without gradients.
DTensor special_chebyshev_polynomial_t(const AnyTensor& x, const AnyTensor& n);
DTensor special_chebyshev_polynomial_u(const AnyTensor& x, const AnyTensor& n);
DTensor special_chebyshev_polynomial_v(const AnyTensor& x, const AnyTensor& n);
DTensor special_chebyshev_polynomial_w(const AnyTensor& x, const AnyTensor& n);
DTensor special_hermite_polynomial_h(const AnyTensor& x, const AnyTensor& n);
DTensor special_hermite_polynomial_he(const AnyTensor& x, const AnyTensor& n);
DTensor special_laguerre_polynomial_l(const AnyTensor& x, const AnyTensor& n);
DTensor special_legendre_polynomial_p(const AnyTensor& x, const AnyTensor& n);
DTensor special_shifted_chebyshev_polynomial_t(const AnyTensor& x, const AnyTensor& n);
DTensor special_shifted_chebyshev_polynomial_u(const AnyTensor& x, const AnyTensor& n);
DTensor special_shifted_chebyshev_polynomial_v(const AnyTensor& x, const AnyTensor& n);
DTensor special_shifted_chebyshev_polynomial_w(const AnyTensor& x, const AnyTensor& n);

DTensor add(const DTensor& a, const at::Scalar& b);  ///< increasing; keeps partial averages
DTensor sub(const DTensor& a, const at::Scalar& b);  ///< as add
DTensor mul(const DTensor& a, const at::Scalar& b);  ///< linear; increasing if b > 0, as `neg` if b < 0
DTensor div(const DTensor& a, const at::Scalar& b);  ///< as mul
DTensor pow(const DTensor& a, const at::Scalar& exponent);

// Comparisons; the results are bool.
DTensor eq(const AnyTensor& a, const AnyTensor& b);
DTensor ne(const AnyTensor& a, const AnyTensor& b);
DTensor lt(const AnyTensor& a, const AnyTensor& b);
DTensor le(const AnyTensor& a, const AnyTensor& b);
DTensor gt(const AnyTensor& a, const AnyTensor& b);
DTensor ge(const AnyTensor& a, const AnyTensor& b);
DTensor isclose(const AnyTensor& a, const AnyTensor& b, double rtol = 1e-5, double atol = 1e-8, bool equal_nan = false);
DTensor eq(const DTensor& a, const at::Scalar& b);
DTensor ne(const DTensor& a, const at::Scalar& b);
DTensor lt(const DTensor& a, const at::Scalar& b);
DTensor le(const DTensor& a, const at::Scalar& b);
DTensor gt(const DTensor& a, const at::Scalar& b);
DTensor ge(const DTensor& a, const at::Scalar& b);

// Tensors are broadcast to a common size. `condition` and `mask` are bool.
DTensor where(const AnyTensor& condition, const AnyTensor& a, const AnyTensor& b);
DTensor where(const AnyTensor& condition, const AnyTensor& a, const at::Scalar& b);
DTensor where(const AnyTensor& condition, const at::Scalar& a, const AnyTensor& b);
DTensor where(const DTensor& condition, const at::Scalar& a, const at::Scalar& b);
DTensor masked_fill(const AnyTensor& x, const AnyTensor& mask, const at::Scalar& value);
DTensor lerp(const AnyTensor& a, const AnyTensor& b, const AnyTensor& weight);  ///< a + weight * (b - a)
DTensor addcmul(const AnyTensor& x, const AnyTensor& a, const AnyTensor& b,
                const at::Scalar& value = 1);  ///< x + value * a * b
DTensor addcdiv(const AnyTensor& x, const AnyTensor& a, const AnyTensor& b,
                const at::Scalar& value = 1);  ///< x + value * a / b

/// Calls any other op of this kind: `compute` computes each element of the result from the elements of the inputs at
/// the same place, after broadcasting. For example, `pointwise("rsub", {{a, b}}, f)` with an `f` that calls `at::rsub`.
DTensor pointwise(const std::string& op, const std::vector<DTensor>& inputs,
                  FunctionRef<at::Tensor(std::span<const DTensor> inputs)> compute);

// In place: `x` keeps its placements, and so do other references to it. They return `x`. They throw
// `Error(unsupported)` if the result cannot be placed as `x` is, for example if `x` is partial and the op is not
// linear.
DTensor add_(const DTensor& x, const AnyTensor& b);  ///< linear
DTensor sub_(const DTensor& x, const AnyTensor& b);  ///< linear
DTensor mul_(const DTensor& x, const AnyTensor& b);  ///< linear in each
DTensor div_(const DTensor& x, const AnyTensor& b);  ///< linear in x
DTensor add_(const DTensor& x, const at::Scalar& b);
DTensor sub_(const DTensor& x, const at::Scalar& b);
DTensor mul_(const DTensor& x, const at::Scalar& b);  ///< linear
DTensor div_(const DTensor& x, const at::Scalar& b);  ///< linear
DTensor masked_fill_(const DTensor& x, const AnyTensor& mask, const at::Scalar& value);
// These take every kind of partial x. `fill_` gives `value`; PyTorch fills each rank's part of a sum with it.
DTensor copy_(const DTensor& x, const AnyTensor& from);
DTensor fill_(const DTensor& x, const at::Scalar& value);
DTensor zero_(const DTensor& x);

// Write the result to `out`, which has the result's size and keeps its placements: the others are redistributed for
// that. They return `out`, and throw `Error(unsupported)` if no placements of the others give a result that is placed
// as `out`, and `Error(invalid_argument)` for a result of another size or a tensor that requires grad. PyTorch: `out=`.
DTensor add_out(const DTensor& out, const AnyTensor& a, const AnyTensor& b);
DTensor sub_out(const DTensor& out, const AnyTensor& a, const AnyTensor& b);
DTensor mul_out(const DTensor& out, const AnyTensor& a, const AnyTensor& b);
DTensor div_out(const DTensor& out, const AnyTensor& a, const AnyTensor& b);
DTensor matmul_out(const DTensor& out, const AnyTensor& a, const AnyTensor& b);  ///< of two dimensions or more

// --- products

/// Multiplies [..., m, k] by [..., k, n]; the other dimensions are broadcast to each other. A tensor of one dimension
/// is a row on the left and a column on the right. Along a mesh dimension, it can shard the rows of a, the columns of
/// b, the other dimensions, or both tensors along k, which makes the result partial. It is linear in each.
DTensor matmul(const AnyTensor& a, const AnyTensor& b);
/// Returns beta * x + alpha * matmul(a, b); x is broadcast. Also for batches, as at::baddbmm.
DTensor addmm(const AnyTensor& x, const AnyTensor& a, const AnyTensor& b, const at::Scalar& beta = 1,
              const at::Scalar& alpha = 1);
/// Multiplies a [m, k] by b [k, n], both of 8-bit floating-point numbers, as `matmul` of a * scale_a and b * scale_b.
/// The scales are of float: [], or for each row of a [m, 1] and for each column of b [1, n]. It computes in float and
/// returns `dtype`. Placed as matmul; a partial product is reduced before it is rounded to `dtype`. LibTorch 1.13 has
/// no such numbers, and any other a and b throw `Error(invalid_argument)`. PyTorch: `_scaled_mm`.
DTensor scaled_mm(const DTensor& a, const DTensor& b, const AnyTensor& scale_a, const AnyTensor& scale_b,
                  at::ScalarType dtype = at::kBFloat16);
/// Multiplies matrices group by group. Group i is the indices from ends[i - 1], or 0, to ends[i] of one dimension: of
/// the rows of a for a [rows, k] and b [groups, k, n], which returns [rows, n]; of the columns of b for a [groups, m,
/// k] and b [k, columns], which returns [m, columns]; of k for a [m, k] and b [k, n], which returns [groups, m, n].
/// Indices after the last end give 0. It unshards the groups and the dimension that they divide, and is otherwise
/// sharded and linear as matmul. PyTorch: `_grouped_mm`.
DTensor grouped_mm(const DTensor& a, const DTensor& b, const std::vector<std::int64_t>& ends);
/// Returns the sum of products that `equation` states in at::einsum's notation: "bij,bjk->bik". Along a mesh dimension,
/// the tensors can be sharded along one index; if it is summed over, the result is partial. Linear in each tensor.
/// Throws `Error(invalid_argument)` for an equation that does not fit the tensors.
DTensor einsum(const std::string& equation, const std::vector<DTensor>& tensors);
/// Sums the products of a and b over pairs of dimensions: dims_a[i] of a and dims_b[i] of b. The result has the other
/// dimensions of a, followed by those of b. Sharded and linear as einsum.
DTensor tensordot(const DTensor& a, const DTensor& b, const std::vector<std::int64_t>& dims_a,
                  const std::vector<std::int64_t>& dims_b);
/// Computes x @ weight^T + bias for x [..., in], weight [out, in] and bias [out]. If the weight is sharded by rows, the
/// result is sharded along its last dimension (column-wise parallel). If the weight is sharded by columns, and x along
/// its last dimension, the result is partial (row-wise parallel). Linear in x and in the weight.
DTensor linear(const DTensor& x, const DTensor& weight, const std::optional<DTensor>& bias = std::nullopt);
/// Returns the rows of weight [rows, width] at `ids`, of long and any shape. If the weight is sharded by rows, each
/// rank looks up the ids of its rows and the result is partial; in this case every rank throws
/// `Error(invalid_argument)` for an id that is not a row. If the weight is sharded by columns, so is the result. Row
/// `padding_idx` gets no gradient; -1 means no such row.
DTensor embedding(const DTensor& weight, const DTensor& ids, std::int64_t padding_idx = -1);
/// Returns softmax(query @ key^T / sqrt(e)) @ value for a query [..., l, e], a key [..., s, e] and a value [..., s, v].
/// If `is_causal`, row i attends to the first i + 1 keys only. Computes half precision in float. Shards of the leading
/// dimensions stay where they are, for example those of heads; shards of the query's rows only if it is not causal.
DTensor scaled_dot_product_attention(const DTensor& query, const DTensor& key, const DTensor& value,
                                     bool is_causal = false);

// --- along dimensions

/// Normalizes over the last dimensions, whose sizes must be `normalized_shape`. The op unshards these dimensions.
DTensor layer_norm(const DTensor& x, const std::vector<std::int64_t>& normalized_shape,
                   const std::optional<DTensor>& weight = std::nullopt,
                   const std::optional<DTensor>& bias = std::nullopt, double eps = 1e-5);
/// As above, but divides by the root of the mean square: x * rsqrt(mean(x^2) + eps) * weight. Computes half precision
/// in float. By default, `eps` is the machine epsilon of the dtype in which it computes. The result has the dtype of x.
DTensor rms_norm(const DTensor& x, const std::vector<std::int64_t>& normalized_shape,
                 const std::optional<DTensor>& weight = std::nullopt, std::optional<double> eps = std::nullopt);
// group_norm and batch_norm are in tessera/tensor/dtensor_ops/normalization.h.

// If x is sharded along `dim`, it stays so: the ranks exchange maxima and sums only.
DTensor softmax(const DTensor& x, std::int64_t dim);
DTensor log_softmax(const DTensor& x, std::int64_t dim);
// Reduce over `dims`, or over all dimensions if empty. If x is sharded along one of them, the result is partial, except
// where a function of the sum follows, as in `std`, `logsumexp`, `all` and norms of other orders than 0, 1 and
// infinity.
DTensor sum(const DTensor& x, const std::vector<std::int64_t>& dims = {}, bool keepdim = false);  ///< linear
DTensor nansum(const DTensor& x, const std::vector<std::int64_t>& dims = {},
               bool keepdim = false);                                                              ///< NaN counts as 0
DTensor mean(const DTensor& x, const std::vector<std::int64_t>& dims = {}, bool keepdim = false);  ///< linear
// Partial maxima stay so in amax, and partial minima in amin, if x does not require grad.
DTensor amax(const DTensor& x, const std::vector<std::int64_t>& dims = {}, bool keepdim = false);
DTensor amin(const DTensor& x, const std::vector<std::int64_t>& dims = {}, bool keepdim = false);
DTensor prod(const DTensor& x, const std::vector<std::int64_t>& dims = {}, bool keepdim = false);
/// Returns log(sum(exp(x))), without overflow.
DTensor logsumexp(const DTensor& x, const std::vector<std::int64_t>& dims = {}, bool keepdim = false);
// Return whether all, or any, of the elements are not 0; bool.
DTensor all(const DTensor& x, const std::vector<std::int64_t>& dims = {}, bool keepdim = false);
DTensor any(const DTensor& x, const std::vector<std::int64_t>& dims = {}, bool keepdim = false);
/// `correction` is 1 for the sample variance, 0 for that of a population.
DTensor var(const DTensor& x, const std::vector<std::int64_t>& dims = {}, std::int64_t correction = 1,
            bool keepdim = false);
DTensor std(const DTensor& x, const std::vector<std::int64_t>& dims = {}, std::int64_t correction = 1,
            bool keepdim = false);
/// Returns (sum |x|^p)^(1/p); the greatest |x| if p is infinite, the least if it is -infinite, and the number of
/// elements that are not 0 if p is 0. The gradient at a norm of 0 is 0, as are those of elements that are 0 if p < 1.
/// Throws `Error(invalid_argument)` for integers, and without elements if p is negative or infinite.
DTensor vector_norm(const DTensor& x, double p = 2, const std::vector<std::int64_t>& dims = {}, bool keepdim = false);
/// Returns sum |x|^p, the norm before its root, for a finite p. PyTorch: linalg__powsum.
DTensor powsum(const DTensor& x, double p, const std::vector<std::int64_t>& dims = {}, bool keepdim = false);
/// Counts the elements in each of `bins` intervals of equal length from `min` to `max`; others are not counted. If both
/// are equal, they are the extremes of x. The result has the dtype of x and is partial if x is sharded. It has no
/// gradient.
DTensor histc(const DTensor& x, std::int64_t bins = 100, const at::Scalar& min = 0, const at::Scalar& max = 0);
// Return the median of all elements: the lower of the two middle ones if their number is even. If there is a NaN,
// `median` returns NaN; `nanmedian` does not count it. These unshard x.
DTensor median(const DTensor& x);
DTensor nanmedian(const DTensor& x);
/// Return the index of the greatest, or the least, element of x in row-major order.
DTensor argmax(const DTensor& x);
DTensor argmin(const DTensor& x);
// These unshard `dim`.
DTensor argmax(const DTensor& x, std::int64_t dim, bool keepdim = false);
DTensor argmin(const DTensor& x, std::int64_t dim, bool keepdim = false);
DTensor cumsum(const DTensor& x, std::int64_t dim);
DTensor cumprod(const DTensor& x, std::int64_t dim);
DTensor logcumsumexp(const DTensor& x, std::int64_t dim);
struct ValuesAndIndices {
  DTensor values, indices;
};
ValuesAndIndices max(const DTensor& x, std::int64_t dim, bool keepdim = false);
ValuesAndIndices min(const DTensor& x, std::int64_t dim, bool keepdim = false);
ValuesAndIndices median(const DTensor& x, std::int64_t dim, bool keepdim = false);
ValuesAndIndices nanmedian(const DTensor& x, std::int64_t dim, bool keepdim = false);
/// Returns the most frequent value along `dim`, the least of equally frequent ones, and its index.
ValuesAndIndices mode(const DTensor& x, std::int64_t dim = -1, bool keepdim = false);
/// Returns the k-th least value along `dim`, k counted from 1, and its index.
ValuesAndIndices kthvalue(const DTensor& x, std::int64_t k, std::int64_t dim = -1, bool keepdim = false);
// Return for each element the greatest, or the least, of it and those before it along `dim`, and its index.
ValuesAndIndices cummax(const DTensor& x, std::int64_t dim);
ValuesAndIndices cummin(const DTensor& x, std::int64_t dim);
ValuesAndIndices sort(const DTensor& x, std::int64_t dim = -1, bool descending = false);
ValuesAndIndices topk(const DTensor& x, std::int64_t k, std::int64_t dim = -1, bool largest = true);

/// Calls any other op of this kind: `compute` computes along `dims` of the first input, for each place in the other
/// dimensions by itself, and the result has the same size. The op unshards these dimensions, and replicates the other
/// inputs.
DTensor along_dims(const std::string& op, const std::vector<DTensor>& inputs, const std::vector<std::int64_t>& dims,
                   FunctionRef<at::Tensor(std::span<const DTensor> inputs)> compute);

// --- images and signals: see tessera/tensor/dtensor_ops/spatial.h, and for pooling
// tessera/tensor/dtensor_ops/convolution.h.

// --- views: these rearrange elements, and are linear for every kind of partial. Unlike in ATen, it is not specified
// whether a result shares memory with x.

/// Returns the same elements in another shape, of which one size may be -1. Merging and splitting dimensions keeps
/// shards where it can, without communication: a shard of a dimension that is merged with ones in front of it becomes a
/// strided shard, which splitting turns back. Such a shard must be even (its length is divisible by the ranks), unless
/// the dimensions after it that are merged with it have size 1. The op unshards others. `reshape` is the same.
DTensor view(const DTensor& x, std::vector<std::int64_t> size);
DTensor reshape(const DTensor& x, std::vector<std::int64_t> size);
DTensor flatten(const DTensor& x, std::int64_t start_dim = 0, std::int64_t end_dim = -1);
DTensor transpose(const DTensor& x, std::int64_t dim0, std::int64_t dim1);
DTensor t(const DTensor& x);  ///< transposes a tensor of two dimensions; returns one of fewer as it is
DTensor permute(const DTensor& x, const std::vector<std::int64_t>& dims);
DTensor unsqueeze(const DTensor& x, std::int64_t dim);
/// Moves each of the dimensions `from` to the place `to`; the others keep their order.
DTensor movedim(const DTensor& x, const std::vector<std::int64_t>& from, const std::vector<std::int64_t>& to);
// Remove a dimension, or each of several, if its size is 1.
DTensor squeeze(const DTensor& x, std::int64_t dim);
DTensor squeeze(const DTensor& x, const std::vector<std::int64_t>& dims);
DTensor squeeze(const DTensor& x);  ///< all
// The same in place: x and all references to it get another size. They send nothing, return x, and throw
// `Error(unsupported)` if x is sharded along a dimension that they remove.
DTensor squeeze_(const DTensor& x, std::int64_t dim);
DTensor squeeze_(const DTensor& x, const std::vector<std::int64_t>& dims);
DTensor squeeze_(const DTensor& x);  ///< all
/// Repeats dimensions of size 1, and new ones in front; -1 leaves a dimension as it is.
DTensor expand(const DTensor& x, const std::vector<std::int64_t>& size);
/// Repeats x times[d] times along dimension d. If there are more numbers than dimensions, the first ones are for new
/// dimensions in front. The op unshards dimensions that it repeats more than once. `tile` repeats along the last
/// dimensions if there are fewer numbers than dimensions.
DTensor repeat(const DTensor& x, const std::vector<std::int64_t>& times);
DTensor tile(const DTensor& x, const std::vector<std::int64_t>& times);
/// Splits `dim` into `sizes`, one of which may be -1.
DTensor unflatten(const DTensor& x, std::int64_t dim, const std::vector<std::int64_t>& sizes);
DTensor ravel(const DTensor& x);
// Return x with at least one, two or three dimensions.
DTensor atleast_1d(const DTensor& x);
DTensor atleast_2d(const DTensor& x);
DTensor atleast_3d(const DTensor& x);
DTensor broadcast_to(const DTensor& x, const std::vector<std::int64_t>& size);
/// Returns x with local tensors that are contiguous.
DTensor contiguous(const DTensor& x);
/// Returns a view of the memory of the full tensor, with strides and offset in elements, by default the offset of x. If
/// size, strides and offset are those of x, returns x as it is placed. Otherwise it unshards x, and throws
/// `Error(unsupported)` unless x is contiguous with offset 0.
DTensor as_strided(const DTensor& x, const std::vector<std::int64_t>& size, const std::vector<std::int64_t>& strides,
                   std::optional<std::int64_t> storage_offset = std::nullopt);

// --- joining and selecting: as above. They unshard the dimension that they change.

DTensor cat(const std::vector<DTensor>& tensors, std::int64_t dim = 0);  ///< leaves out those of size [0]
DTensor stack(const std::vector<DTensor>& tensors, std::int64_t dim = 0);
std::vector<DTensor> split(const DTensor& x, std::int64_t size, std::int64_t dim = 0);
std::vector<DTensor> split(const DTensor& x, const std::vector<std::int64_t>& sizes, std::int64_t dim = 0);
std::vector<DTensor> chunk(const DTensor& x, std::int64_t chunks, std::int64_t dim = 0);
/// Returns every `step`-th element along `dim` from `begin` to `end`; step > 0. If negative, `begin` and `end` count
/// from the end of the dimension; they are clamped to it.
DTensor slice(const DTensor& x, std::int64_t dim, std::int64_t begin, std::int64_t end, std::int64_t step = 1);
DTensor narrow(const DTensor& x, std::int64_t dim, std::int64_t begin, std::int64_t length);
DTensor select(const DTensor& x, std::int64_t dim, std::int64_t index);
/// Returns select(x, dim, i) for each i.
std::vector<DTensor> unbind(const DTensor& x, std::int64_t dim = 0);
// See tessera/tensor/dtensor_ops/indexing.h for tensors of indices.

DTensor flip(const DTensor& x, const std::vector<std::int64_t>& dims);
/// Moves elements by `shifts` places along each of `dims`, the last ones to the front; without `dims`, along all of x
/// in row-major order.
DTensor roll(const DTensor& x, const std::vector<std::int64_t>& shifts, const std::vector<std::int64_t>& dims = {});
enum class PadMode : std::uint8_t { constant, reflect, replicate, circular };
/// Adds pad[0] elements in front of the last dimension and pad[1] after it, pad[2] and pad[3] to the one before, and so
/// on. A negative number removes elements. `value` is that of PadMode::constant; if it is not 0, partial sums and
/// products are reduced. The modes take the dimensions that LibTorch's take.
DTensor pad(const DTensor& x, const std::vector<std::int64_t>& pad, PadMode mode = PadMode::constant,
            const at::Scalar& value = 0);
DTensor constant_pad_nd(const DTensor& x, const std::vector<std::int64_t>& pad, const at::Scalar& value = 0);
/// Returns x [...], of long, as [..., classes] with 1 at place x and 0 elsewhere. By default there are as many classes
/// as the greatest element takes, which all ranks compute; on a rank outside of the mesh, there are none.
DTensor one_hot(const DTensor& x, std::int64_t classes = -1);
/// Returns for each element of x the index of the first of the ascending `boundaries` that is not below it; that is
/// above it if `right`.
DTensor bucketize(const DTensor& x, const DTensor& boundaries, bool out_int32 = false, bool right = false);

// --- loss and dropout

enum class Reduction : std::uint8_t { none, mean, sum };

struct LossOptions {
  std::optional<DTensor> weight = std::nullopt;  ///< of each class: [classes]
  std::int64_t ignore_index = -100;              ///< a target without loss and gradient
  Reduction reduction = Reduction::mean;
  double label_smoothing = 0;  ///< of cross_entropy
};
/// Return the loss of x, [n, classes, ...] or [classes], for the classes in target, [n, ...] or [], of long. If x is
/// sharded along its classes, it stays so ("loss parallel"): the ranks exchange a few numbers for each target. PyTorch:
/// loss_parallel in torch/distributed/tensor/parallel/loss.py.
DTensor nll_loss(const DTensor& x, const DTensor& target, const LossOptions& options = {});
DTensor cross_entropy(const DTensor& x, const DTensor& target, const LossOptions& options = {});
DTensor mse_loss(const DTensor& x, const DTensor& target, Reduction reduction = Reduction::mean);

/// Sets each element to 0 with probability p and divides the others by 1 - p, with the same elements on any mesh.
/// Linear. The generator must be in the same state on all ranks; it advances by the elements of x. Throws
/// `Error(invalid_argument)` unless 0 <= p <= 1 and x is floating-point or complex. PyTorch: dropout.
DTensor dropout(const DTensor& x, double p, PhiloxGenerator& generator);
/// Multiply elements that are not greater than 0 by a slope: (lower + upper) / 2, or, with a generator, as in training,
/// a slope that is drawn from [lower, upper) for each element. The generator is that of dropout. Throw
/// `Error(invalid_argument)` unless lower <= upper and both are finite.
DTensor rrelu(const DTensor& x, double lower = 1.0 / 8, double upper = 1.0 / 3);
DTensor rrelu(const DTensor& x, PhiloxGenerator& generator, double lower = 1.0 / 8, double upper = 1.0 / 3);

/// Returns whether sizes, dtypes and all elements are equal, the same on all ranks of the mesh.
bool equal(const DTensor& a, const DTensor& b);

}  // namespace tessera::dtensor

namespace tessera {

// Also of a DTensor and a plain tensor, which counts as replicated.
DTensor operator+(const dtensor::AnyTensor& a, const dtensor::AnyTensor& b);
DTensor operator-(const dtensor::AnyTensor& a, const dtensor::AnyTensor& b);
DTensor operator*(const dtensor::AnyTensor& a, const dtensor::AnyTensor& b);
DTensor operator/(const dtensor::AnyTensor& a, const dtensor::AnyTensor& b);
DTensor operator+(const DTensor& a, const at::Scalar& b);
DTensor operator-(const DTensor& a, const at::Scalar& b);
DTensor operator*(const DTensor& a, const at::Scalar& b);
DTensor operator/(const DTensor& a, const at::Scalar& b);
DTensor operator+(const at::Scalar& a, const DTensor& b);
DTensor operator-(const at::Scalar& a, const DTensor& b);
DTensor operator*(const at::Scalar& a, const DTensor& b);
DTensor operator/(const at::Scalar& a, const DTensor& b);
DTensor operator-(const DTensor& a);

}  // namespace tessera
