// Linear algebra on matrices in the last two dimensions.

#include <ATen/TensorOperators.h>
#include <ATen/ops/cholesky_inverse.h>
#include <ATen/ops/cholesky_solve.h>
#include <ATen/ops/diag_embed.h>
#include <ATen/ops/geqrf.h>
#include <ATen/ops/linalg_cholesky.h>
#include <ATen/ops/linalg_cross.h>
#include <ATen/ops/linalg_det.h>
#include <ATen/ops/linalg_eig.h>
#include <ATen/ops/linalg_eigh.h>
#include <ATen/ops/linalg_householder_product.h>
#include <ATen/ops/linalg_inv.h>
#include <ATen/ops/linalg_ldl_factor.h>
#include <ATen/ops/linalg_ldl_solve.h>
#include <ATen/ops/linalg_lu.h>
#include <ATen/ops/linalg_lu_factor.h>
#include <ATen/ops/linalg_lu_solve.h>
#include <ATen/ops/linalg_matrix_exp.h>
#include <ATen/ops/linalg_matrix_power.h>
#include <ATen/ops/linalg_pinv.h>
#include <ATen/ops/linalg_qr.h>
#include <ATen/ops/linalg_slogdet.h>
#include <ATen/ops/linalg_solve.h>
#include <ATen/ops/linalg_solve_triangular.h>
#include <ATen/ops/linalg_svd.h>
#include <ATen/ops/lu_unpack.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/ormqr.h>
#include <ATen/ops/real.h>
#include <ATen/ops/tril.h>
#include <ATen/ops/triu.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstdlib>
#include <tuple>

#include "tensor/dtensor_ops/calls.h"
#include "tensor/dtensor_rules/shared_dims.h"
#include "tessera/base/error.h"

namespace tessera::dtensor {

namespace {

using Tensors = std::vector<at::Tensor>;

struct MatrixSize {
  Sizes batches;
  std::int64_t rows = 0, columns = 0, least = 0;  // `least`: of both
  Sizes with(const Sizes& more) const {
    Sizes size = batches;
    size.insert(size.end(), more.begin(), more.end());
    return size;
  }
};

MatrixSize matrix_size(const char* op, const DTensor& a, bool is_square) {
  if (a.dim() < 2 || (is_square && a.size(-1) != a.size(-2))) {
    fail(ErrorCode::invalid_argument, "{} of size {}: expected {}", op, shape_to_string(a.size()),
         is_square ? "square matrices" : "two dimensions or more");
  }
  const std::int64_t rows = a.size(-2), columns = a.size(-1);
  return {Sizes(a.size().begin(), a.size().end() - 2), rows, columns, std::min(rows, columns)};
}

at::ScalarType real_type(const DTensor& a) { return c10::toRealValueType(a.scalar_type()); }

// For results of `sizes`; `f` takes a local tensor and returns the local results.
template <typename F>
std::vector<DTensor> of_matrices(const char* op, const DTensor& a, const std::vector<Sizes>& sizes, const F& f,
                                 const DTypes& dtypes = {}) {
  const auto rule = [&](Inputs inputs) {
    OpRule given = rules::along_dims(inputs, {a.dim() - 2, a.dim() - 1});
    given.output_size = sizes[0];
    return given;
  };
  const auto compute = [&](Inputs inputs) -> Tensors { return f(inputs[0].local_tensor()); };
  return call_for_all(op, {a}, rule, {sizes.begin() + 1, sizes.end()}, compute, dtypes);
}

// `f` returns a pair of local tensors.
template <typename F>
Factors factors_of(const char* op, const DTensor& a, const Sizes& first, const Sizes& second, const F& f,
                   const DTypes& dtypes = {}) {
  const auto compute = [&](const at::Tensor& t) { return to_tensors(f(t)); };
  std::vector<DTensor> both = of_matrices(op, a, {first, second}, compute, dtypes);
  return {both[0], both[1]};
}

// For one result, of the size of a. `f` takes a local tensor.
template <typename F>
DTensor of_square(const char* op, const DTensor& a, const F& f) {
  matrix_size(op, a, true);
  return of_matrices(op, a, {a.size()}, [&](const at::Tensor& t) { return Tensors{f(t)}; })[0];
}

// `f` takes local tensors of a and b.
template <typename F>
DTensor solve(const char* op, const DTensor& a, const DTensor& b, const F& f) {
  const std::vector<DTensor> inputs = {a, b};
  const MatrixSize m = matrix_size(op, a, true);
  if (b.dim() < 2 || b.size(-2) != m.rows) {
    rules::refuse_sizes(op, inputs, "[..., n, n] and [..., n, columns]");
  }
  // The rows and columns of a have one label, and so are not sharded.
  constexpr int kRow = -1, kColumn = -2;
  const auto labels_of = [](std::int64_t dims, int last) {
    std::vector<int> labels;
    for (std::int64_t d = dims; d > 2; --d) labels.push_back(static_cast<int>(d));
    labels.insert(labels.end(), {kRow, last});
    return labels;
  };
  const rules::ProductLabels labels{{labels_of(a.dim(), kRow), labels_of(b.dim(), kColumn)},
                                    labels_of(std::max(a.dim(), b.dim()), kColumn),
                                    "[..., n, n] and [..., n, columns] whose other dimensions broadcast to each other"};
  const auto rule = [&](Inputs given) {
    OpRule product = rules::product(op, given, labels);
    std::erase_if(product.strategies, [](const OpStrategy& strategy) { return strategy.inputs[0].is_partial(); });
    return product;
  };
  return call(op, inputs, rule, [&](Inputs local) {
    at::Tensor right = local[1].local_tensor();
    while (right.dim() < a.dim()) right = right.unsqueeze(0);  // else it might count as vectors
    return f(local[0].local_tensor(), right);
  });
}

// The rule of an op on batches of several inputs, which are broadcast to each other. `inner[i]` is the number of the
// last dimensions of input i that are not of the batch, and `last` are the sizes of those of the result. `kept`,
// counted from the end, is a dimension of the last input that is also one of the result and keeps its shards; the op is
// then linear in this input.
OpRule batched(const char* op, Inputs inputs, const Sizes& inner, const Sizes& last,
               std::optional<std::int64_t> kept = std::nullopt) {
  const auto batch_of = [&](std::size_t i) {
    const Sizes& size = inputs[i].size();
    return Sizes(size.begin(), size.end() - static_cast<std::ptrdiff_t>(inner[i]));
  };
  Sizes batch;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const std::optional<Sizes> both = rules::broadcast(batch, batch_of(i));
    if (!both) rules::refuse_sizes(op, inputs, "batches that broadcast to each other");
    batch = *both;
  }
  std::vector<rules::SharedDim> dims;
  for (std::size_t d = 0; d < batch.size(); ++d) {
    rules::SharedDim& dim = dims.emplace_back(rules::SharedDim{d, {}});
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      const Sizes own = batch_of(i);
      const std::size_t before = batch.size() - own.size();
      const bool is_broadcast = d < before || own[d - before] != batch[d];
      dim.inputs.push_back(is_broadcast ? std::nullopt : std::optional(d - before));
    }
  }
  Sizes size = batch;
  size.insert(size.end(), last.begin(), last.end());
  const std::size_t of_last = inputs.size() - 1;
  if (kept) {
    const auto from_end = static_cast<std::size_t>(*kept);
    rules::SharedDim& dim = dims.emplace_back(rules::SharedDim{size.size() - from_end, {}});
    dim.inputs.resize(inputs.size());
    dim.inputs[of_last] = inputs[of_last].size().size() - from_end;
  }
  OpRule rule = rules::shared(inputs, size, dims);
  rule.may_shard = false;
  if (kept) rules::add_partials(rule, inputs, {&of_last, 1}, rules::Partials::linear);
  return rule;
}

// Throws Error(invalid_argument) unless b has `columns` vectors of n, [..., n, columns], for matrices and pivots of n.
void check_factored(const char* op, const DTensor& factor, const DTensor& pivots, const DTensor& b) {
  const MatrixSize m = matrix_size(op, factor, true);
  const std::vector<DTensor> inputs = {factor, pivots, b};
  if (pivots.size() != m.with({m.rows}) || b.dim() < 2 || b.size(-2) != m.rows) {
    rules::refuse_sizes(op, inputs, "[..., n, n], pivots [..., n] and [..., n, columns]");
  }
}

// Throws Error(invalid_argument) if a pivot is not a row of matrices with `rows` rows, or with `has_blocks` the
// negative of one, in blocks of two rows. LAPACK does not check it.
void check_pivots(const char* op, const at::Tensor& pivots, std::int64_t rows, bool has_blocks = false) {
  const at::Tensor numbers = has_blocks ? pivots.abs() : pivots;
  const at::Tensor is_row = numbers.ge(1).logical_and(numbers.le(rows));
  if (is_row.all().item<bool>()) return;
  fail(ErrorCode::invalid_argument, "{}: pivot {} is out of range, expected 1 to {}{}", op,
       first_invalid(pivots, is_row), rows, has_blocks ? fmt::format(" or -{} to -1", rows) : "");
}

// For matrices that are factored: `f` takes local tensors of the factors, the pivots and b.
template <typename F>
DTensor solve_factored(const char* op, const DTensor& factor, const DTensor& pivots, const DTensor& b, const F& f) {
  check_factored(op, factor, pivots, b);
  const auto rule = [&](Inputs inputs) { return batched(op, inputs, {2, 1, 2}, {b.size(-2), b.size(-1)}, 1); };
  const std::vector<DTensor> inputs = {factor, pivots, b};
  return call(op, inputs, rule, [&](Inputs local) -> at::Tensor {
    return f(local[0].local_tensor(), local[1].local_tensor(), local[2].local_tensor());
  });
}

// Throws Error(invalid_argument) unless a [..., m, n] and tau [..., k] are of batches of k <= n <= m reflections.
void check_reflections(const char* op, Inputs inputs, bool are_tall) {
  const MatrixSize m = matrix_size(op, inputs[0], false);
  const DTensor& tau = inputs[1];
  const bool fits = tau.dim() >= 1 && tau.size() == m.with({tau.size(-1)}) && tau.size(-1) <= m.least &&
                    (!are_tall || m.columns <= m.rows);
  if (!fits) {
    rules::refuse_sizes(op, inputs,
                        are_tall ? "[..., m, n] and [..., k], k <= n <= m"
                                 : "[..., m, n], [..., k] with k <= m and n, and the matrices to multiply");
  }
}

// Returns `result`, computed from `inputs`; LibTorch's has no gradient without elements.
at::Tensor tracked(const at::Tensor& result, Inputs inputs) {
  return result.numel() > 0 ? result : zeros_from(result.sizes().vec(), locals_of(inputs));
}

// `f` takes a matrix and the offset of a diagonal in it, and returns one of the triangles that this divides it into.
template <typename F>
DTensor triangle(const char* op, const DTensor& x, std::int64_t offset, const F& f) {
  matrix_size(op, x, false);
  const auto rule = [&](Inputs inputs) { return rules::elementwise(op, inputs, Linearity::linear); };
  return call(op, {&x, 1}, rule, [&](Inputs inputs) -> at::Tensor {
    const at::Tensor& local = inputs[0].local_tensor();
    const at::TensorOptions options = at::TensorOptions().dtype(at::kBool).device(local.device());
    const at::Tensor is_kept = at::zeros({local.size(-2), local.size(-1)}, options);
    const auto row = static_cast<std::size_t>(x.dim() - 2), column = row + 1;
    for (const LocalBox& part : inputs[0].layout().local_boxes(*inputs[0].device_mesh().coordinate())) {
      const Sizes &offsets = part.box.offsets, &sizes = part.box.sizes;
      const at::Tensor all = at::ones({sizes[row], sizes[column]}, options);
      is_kept.narrow(0, part.local_offsets[row], sizes[row])
          .narrow(1, part.local_offsets[column], sizes[column])
          .copy_(f(all, offset + offsets[row] - offsets[column]));
    }
    return local.masked_fill(is_kept.logical_not(), 0);
  });
}

}  // namespace

Svd linalg_svd(const DTensor& a, bool full_matrices) {
  const MatrixSize m = matrix_size("linalg_svd", a, false);
  const std::int64_t of_u = full_matrices ? m.rows : m.least, of_vh = full_matrices ? m.columns : m.least;
  std::vector<DTensor> all =
      of_matrices("linalg_svd", a, {m.with({m.rows, of_u}), m.with({m.least}), m.with({of_vh, m.columns})},
                  [&](const at::Tensor& t) { return to_tensors(at::linalg_svd(t, full_matrices)); },
                  {a.scalar_type(), real_type(a), a.scalar_type()});
  return {all[0], all[1], all[2]};
}

Factors linalg_eigh(const DTensor& a, bool lower) {
  const MatrixSize m = matrix_size("linalg_eigh", a, true);
  return factors_of("linalg_eigh", a, m.with({m.rows}), a.size(),
                    [&](const at::Tensor& t) { return at::linalg_eigh(t, lower ? "L" : "U"); },
                    {real_type(a), a.scalar_type()});
}

Factors linalg_eig(const DTensor& a) {
  const MatrixSize m = matrix_size("linalg_eig", a, true);
  const at::ScalarType dtype = at::promoteTypes(a.scalar_type(), at::kComplexFloat);
  return factors_of("linalg_eig", a, m.with({m.rows}), a.size(), [](const at::Tensor& t) { return at::linalg_eig(t); },
                    {dtype, dtype});
}

Factors linalg_qr(const DTensor& a) {
  const MatrixSize m = matrix_size("linalg_qr", a, false);
  return factors_of("linalg_qr", a, m.with({m.rows, m.least}), m.with({m.least, m.columns}),
                    [](const at::Tensor& t) { return at::linalg_qr(t); });
}

Factors linalg_lu_factor(const DTensor& a) {
  const MatrixSize m = matrix_size("linalg_lu_factor", a, false);
  return factors_of("linalg_lu_factor", a, a.size(), m.with({m.least}),
                    [](const at::Tensor& t) { return at::linalg_lu_factor(t); }, {a.scalar_type(), at::kInt});
}

Factors linalg_slogdet(const DTensor& a) {
  const MatrixSize m = matrix_size("linalg_slogdet", a, true);
  const auto compute = [](const at::Tensor& t) {
    auto [sign, logarithm] = at::linalg_slogdet(t);
    // ATen's has no gradient without elements. The logarithm is real, also of complex matrices.
    if (t.numel() == 0) logarithm = logarithm + at::real(t.sum());
    return std::make_tuple(sign, logarithm);
  };
  return factors_of("linalg_slogdet", a, m.batches, m.batches, compute, {a.scalar_type(), real_type(a)});
}

DTensor linalg_cholesky(const DTensor& a) {
  return of_square("linalg_cholesky", a, [](const at::Tensor& t) { return at::linalg_cholesky(t); });
}

DTensor linalg_inv(const DTensor& a) {
  return of_square("linalg_inv", a, [](const at::Tensor& t) { return at::linalg_inv(t); });
}

DTensor linalg_matrix_exp(const DTensor& a) {
  return of_square("linalg_matrix_exp", a, [](const at::Tensor& t) { return at::linalg_matrix_exp(t); });
}

DTensor linalg_matrix_power(const DTensor& a, std::int64_t n) {
  return of_square("linalg_matrix_power", a, [&](const at::Tensor& t) { return at::linalg_matrix_power(t, n); });
}

DTensor linalg_pinv(const DTensor& a) {
  const MatrixSize m = matrix_size("linalg_pinv", a, false);
  return of_matrices("linalg_pinv", a, {m.with({m.columns, m.rows})},
                     [](const at::Tensor& t) { return Tensors{at::linalg_pinv(t)}; })[0];
}

DTensor linalg_det(const DTensor& a) {
  const MatrixSize m = matrix_size("linalg_det", a, true);
  return of_matrices("linalg_det", a, {m.batches}, [](const at::Tensor& t) {
    const at::Tensor det = at::linalg_det(t);
    return Tensors{t.numel() > 0 ? det : det + t.sum()};  // ATen's has no gradient without elements
  })[0];
}

DTensor linalg_solve(const DTensor& a, const DTensor& b) {
  return solve("linalg_solve", a, b, [](const at::Tensor& s, const at::Tensor& t) { return at::linalg_solve(s, t); });
}

DTensor linalg_solve_triangular(const DTensor& a, const DTensor& b, bool upper) {
  return solve("linalg_solve_triangular", a, b,
               [&](const at::Tensor& s, const at::Tensor& t) { return at::linalg_solve_triangular(s, t, upper); });
}

DTensor cholesky_solve(const DTensor& b, const DTensor& factor, bool upper) {
  return solve("cholesky_solve", factor, b,
               [&](const at::Tensor& s, const at::Tensor& t) { return at::cholesky_solve(t, s, upper); });
}

Factors linalg_ldl_factor(const DTensor& a, bool hermitian) {
  const MatrixSize m = matrix_size("linalg_ldl_factor", a, true);
  return factors_of("linalg_ldl_factor", a, a.size(), m.with({m.rows}),
                    [&](const at::Tensor& t) { return at::linalg_ldl_factor(t, hermitian); },
                    {a.scalar_type(), at::kInt});
}

PermutationAndTriangles linalg_lu(const DTensor& a) {
  const MatrixSize m = matrix_size("linalg_lu", a, false);
  std::vector<DTensor> all =
      of_matrices("linalg_lu", a, {m.with({m.rows, m.rows}), m.with({m.rows, m.least}), m.with({m.least, m.columns})},
                  [](const at::Tensor& t) { return to_tensors(at::linalg_lu(t)); });
  return {all[0], all[1], all[2]};
}

PermutationAndTriangles lu_unpack(const DTensor& lu, const DTensor& pivots) {
  const MatrixSize m = matrix_size("lu_unpack", lu, false);
  const std::vector<DTensor> inputs = {lu, pivots};
  if (pivots.size() != m.with({m.least})) {
    rules::refuse_sizes("lu_unpack", inputs, "[..., m, n] and pivots [..., k], k the lesser of m and n");
  }
  const auto rule = [&](Inputs given) { return batched("lu_unpack", given, {2, 1}, {m.rows, m.rows}); };
  std::vector<DTensor> all = call_for_all(
      "lu_unpack", inputs, rule, {m.with({m.rows, m.least}), m.with({m.least, m.columns})}, [&](Inputs local) {
        check_pivots("lu_unpack", local[1].local_tensor(), m.rows);
        return to_tensors(at::lu_unpack(local[0].local_tensor(), local[1].local_tensor()));
      });
  return {all[0], all[1], all[2]};
}

DTensor linalg_lu_solve(const DTensor& lu, const DTensor& pivots, const DTensor& b) {
  return solve_factored("linalg_lu_solve", lu, pivots, b,
                        [](const at::Tensor& factor, const at::Tensor& rows, const at::Tensor& t) {
                          check_pivots("linalg_lu_solve", rows, factor.size(-1));
                          return at::linalg_lu_solve(factor, rows, t);
                        });
}

DTensor linalg_ldl_solve(const DTensor& ld, const DTensor& pivots, const DTensor& b, bool hermitian) {
  return solve_factored("linalg_ldl_solve", ld, pivots, b,
                        [&](const at::Tensor& factor, const at::Tensor& rows, const at::Tensor& t) {
                          check_pivots("linalg_ldl_solve", rows, factor.size(-1), true);
                          return at::linalg_ldl_solve(factor, rows, t, hermitian);
                        });
}

DTensor cholesky_inverse(const DTensor& factor, bool upper) {
  return of_square("cholesky_inverse", factor, [&](const at::Tensor& t) { return at::cholesky_inverse(t, upper); });
}

Factors geqrf(const DTensor& a) {
  const MatrixSize m = matrix_size("geqrf", a, false);
  return factors_of("geqrf", a, a.size(), m.with({m.least}), [](const at::Tensor& t) { return at::geqrf(t); });
}

DTensor linalg_householder_product(const DTensor& a, const DTensor& tau) {
  const std::vector<DTensor> inputs = {a, tau};
  check_reflections("linalg_householder_product", inputs, true);
  const auto rule = [](Inputs given) {
    return batched("linalg_householder_product", given, {2, 1}, {given[0].size(-2), given[0].size(-1)});
  };
  return call("linalg_householder_product", inputs, rule, [](Inputs local) {
    return tracked(at::linalg_householder_product(local[0].local_tensor(), local[1].local_tensor()), local);
  });
}

DTensor ormqr(const DTensor& a, const DTensor& tau, const DTensor& c, bool left, bool transpose) {
  const std::vector<DTensor> inputs = {a, tau, c};
  check_reflections("ormqr", inputs, false);
  const bool fits = c.dim() == a.dim() && c.size(left ? -2 : -1) == a.size(-2) &&
                    std::equal(a.size().begin(), a.size().end() - 2, c.size().begin());
  if (!fits) {
    rules::refuse_sizes(
        "ormqr", inputs,
        left ? "[..., m, n], [..., k] and [..., m, columns]" : "[..., m, n], [..., k] and [..., rows, m]");
  }
  const auto rule = [&](Inputs given) {
    return batched("ormqr", given, {2, 1, 2}, {c.size(-2), c.size(-1)}, left ? 1 : 2);
  };
  return call("ormqr", inputs, rule, [&](Inputs local) {
    const at::Tensor &reflections = local[0].local_tensor(), &factors = local[1].local_tensor();
    return tracked(at::ormqr(reflections, factors, local[2].local_tensor(), left, transpose), local);
  });
}

DTensor linalg_cross(const DTensor& a, const DTensor& b, std::int64_t dim) {
  const std::vector<DTensor> inputs = {a, b};
  const std::int64_t dims = std::max(a.dim(), b.dim()), along = rules::dim_from_front("linalg_cross", dim, dims);
  const auto rule = [&](Inputs given) {
    OpRule cross = rules::elementwise("linalg_cross", given, Linearity::product);
    std::erase_if(cross.strategies, [&](const OpStrategy& strategy) { return strategy.output.is_shard(along); });
    return cross;
  };
  return call("linalg_cross", inputs, rule, [&](Inputs local) {
    return at::linalg_cross(local[0].local_tensor(), local[1].local_tensor(), along - dims);
  });
}

DTensor tril(const DTensor& x, std::int64_t offset) {
  return triangle("tril", x, offset, [](const at::Tensor& t, std::int64_t diagonal) { return at::tril(t, diagonal); });
}
DTensor triu(const DTensor& x, std::int64_t offset) {
  return triangle("triu", x, offset, [](const at::Tensor& t, std::int64_t diagonal) { return at::triu(t, diagonal); });
}

DTensor diag_embed(const DTensor& x, std::int64_t offset) {
  if (x.dim() < 1) fail(ErrorCode::invalid_argument, "diag_embed of size []: expected one dimension or more");
  const std::int64_t length = x.size(-1) + std::abs(offset);
  Sizes size = x.size();
  size.pop_back();
  size.insert(size.end(), 2, length);
  rules::DimMap map = same_dims(x);
  map.back() = std::nullopt;
  return mapped(
      "diag_embed", x, size, map, [&](const at::Tensor& t, const Sizes&) { return at::diag_embed(t, offset); },
      rules::kNotLinear);
}

}  // namespace tessera::dtensor
