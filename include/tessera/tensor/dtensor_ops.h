#pragma once
/// \file
/// The built-in ops on DTensors, with ATen's names.
///
/// Each gives what the ATen function of its name gives on the full tensors. An op marked "linear" takes partial inputs
/// (sum or average) without reducing them first. All are collectives of the mesh's ranks. They throw as `call` does.
///
/// `register_placement_rule` replaces the rule of an op, by its name ("relu"). The ops on sharded tensors
/// (tessera/tensor/ops.h) overload with these. PyTorch: torch/distributed/tensor/_ops.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "tessera/tensor/dtensor.h"

namespace tessera::dtensor {

// --- element by element

DTensor abs(const DTensor& x);
DTensor exp(const DTensor& x);
DTensor gelu(const DTensor& x);
DTensor log(const DTensor& x);
DTensor neg(const DTensor& x);  ///< linear
DTensor relu(const DTensor& x);
DTensor rsqrt(const DTensor& x);
DTensor sigmoid(const DTensor& x);
DTensor silu(const DTensor& x);
DTensor sqrt(const DTensor& x);
DTensor square(const DTensor& x);
DTensor tanh(const DTensor& x);
DTensor clone(const DTensor& x);                     ///< linear
DTensor to(const DTensor& x, at::ScalarType dtype);  ///< linear

// Both tensors are broadcast to a common size.
DTensor add(const DTensor& a, const DTensor& b);  ///< linear
DTensor sub(const DTensor& a, const DTensor& b);  ///< linear
DTensor mul(const DTensor& a, const DTensor& b);
DTensor div(const DTensor& a, const DTensor& b);
DTensor maximum(const DTensor& a, const DTensor& b);
DTensor minimum(const DTensor& a, const DTensor& b);
DTensor add(const DTensor& a, const at::Scalar& b);
DTensor mul(const DTensor& a, const at::Scalar& b);  ///< linear
DTensor div(const DTensor& a, const at::Scalar& b);  ///< linear
DTensor pow(const DTensor& a, const at::Scalar& exponent);

// --- products

/// Multiplies [..., m, k] by [k, n], or [b, m, k] by [b, k, n]. Along a mesh dimension, it can shard the rows of a, the
/// columns of b, the batches, or both tensors along k, which makes the result partial.
DTensor matmul(const DTensor& a, const DTensor& b);
/// x is [..., in], weight [out, in], bias [out]. If the weight is sharded by rows, the result is sharded along its last
/// dimension (column-wise parallel). If the weight is sharded by columns, and x along its last dimension, the result is
/// partial (row-wise parallel).
DTensor linear(const DTensor& x, const DTensor& weight, const std::optional<DTensor>& bias = std::nullopt);
/// weight is [rows, width]; ids are of any shape, of long. If the weight is sharded by rows, each rank looks up the ids
/// of its rows and the result is partial; in this case every rank throws `Error(invalid_argument)` for an id that is
/// not a row. If the weight is sharded by columns, so is the result. Row `padding_idx` gets no gradient; -1 means no
/// such row.
DTensor embedding(const DTensor& weight, const DTensor& ids, std::int64_t padding_idx = -1);

// --- along dimensions

/// Normalizes over the last dimensions, whose sizes must be `normalized_shape`. The op unshards these dimensions.
DTensor layer_norm(const DTensor& x, const std::vector<std::int64_t>& normalized_shape,
                   const std::optional<DTensor>& weight = std::nullopt,
                   const std::optional<DTensor>& bias = std::nullopt, double eps = 1e-5);
// These unshard `dim`.
DTensor softmax(const DTensor& x, std::int64_t dim);
DTensor log_softmax(const DTensor& x, std::int64_t dim);
// Reduce over `dims`, or over all dimensions if empty. If x is sharded along one of them, the result is partial.
DTensor sum(const DTensor& x, const std::vector<std::int64_t>& dims = {}, bool keepdim = false);   ///< linear
DTensor mean(const DTensor& x, const std::vector<std::int64_t>& dims = {}, bool keepdim = false);  ///< linear
DTensor amax(const DTensor& x, const std::vector<std::int64_t>& dims = {}, bool keepdim = false);
DTensor amin(const DTensor& x, const std::vector<std::int64_t>& dims = {}, bool keepdim = false);
DTensor transpose(const DTensor& x, std::int64_t dim0, std::int64_t dim1);  ///< linear, for every kind of partial

/// Returns whether sizes, dtypes and all elements are equal, the same on all ranks of the mesh.
bool equal(const DTensor& a, const DTensor& b);

}  // namespace tessera::dtensor

namespace tessera {

DTensor operator+(const DTensor& a, const DTensor& b);
DTensor operator-(const DTensor& a, const DTensor& b);
DTensor operator*(const DTensor& a, const DTensor& b);
DTensor operator/(const DTensor& a, const DTensor& b);

}  // namespace tessera
