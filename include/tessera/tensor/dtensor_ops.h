#pragma once
/// \file
/// The ops on DTensors that are built in, under the names that ATen gives them; another rule for one is registered
/// under its name ("relu", see `register_placement_rule`).
///
/// Each does what the ATen function of its name does on the whole tensors. Where said "linear", partial inputs (of sum
/// or average) need not be reduced. Collectives; errors as those of `call`, and of ATen where local tensors don't fit.
/// PyTorch: torch/distributed/tensor/_ops.

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

/// Of tensors that broadcast to each other.
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

/// [..., m, k] x [k, n], or [b, m, k] x [b, k, n]. Along a mesh dimension: rows of a; columns of b; both cut along k,
/// which makes the result partial; batches.
DTensor matmul(const DTensor& a, const DTensor& b);
/// x [..., in], weight [out, in], bias [out]. With the weight's rows cut the result is cut along its last dimension
/// (column-wise parallel), with its columns and x's last dimension cut it is partial (row-wise parallel).
DTensor linear(const DTensor& x, const DTensor& weight, const std::optional<DTensor>& bias = std::nullopt);
/// weight [rows, width], ids of any shape, of long. With the weight's rows cut each rank has those of its ids, and the
/// result is partial; with its columns cut, so is the result. Throws `Error(invalid_argument)` on all ranks for an id
/// that isn't a row, where the weight's rows are cut. Row `padding_idx` gets no gradient; -1: none.
DTensor embedding(const DTensor& weight, const DTensor& ids, std::int64_t padding_idx = -1);

// --- along dimensions

/// Over the last dimensions, which must be `normalized_shape`; those stay whole.
DTensor layer_norm(const DTensor& x, const std::vector<std::int64_t>& normalized_shape,
                   const std::optional<DTensor>& weight = std::nullopt,
                   const std::optional<DTensor>& bias = std::nullopt, double eps = 1e-5);
/// `dim` stays whole.
DTensor softmax(const DTensor& x, std::int64_t dim);
DTensor log_softmax(const DTensor& x, std::int64_t dim);
/// Over `dims`, all of them if empty. Cut in one of them the result is partial.
DTensor sum(const DTensor& x, const std::vector<std::int64_t>& dims = {}, bool keepdim = false);   ///< linear
DTensor mean(const DTensor& x, const std::vector<std::int64_t>& dims = {}, bool keepdim = false);  ///< linear
DTensor amax(const DTensor& x, const std::vector<std::int64_t>& dims = {}, bool keepdim = false);
DTensor amin(const DTensor& x, const std::vector<std::int64_t>& dims = {}, bool keepdim = false);
DTensor transpose(const DTensor& x, std::int64_t dim0, std::int64_t dim1);  ///< linear, of every partial

/// Whether sizes, dtypes and all elements are equal; the same answer on all ranks of the mesh.
bool equal(const DTensor& a, const DTensor& b);

}  // namespace tessera::dtensor

namespace tessera {

DTensor operator+(const DTensor& a, const DTensor& b);
DTensor operator-(const DTensor& a, const DTensor& b);
DTensor operator*(const DTensor& a, const DTensor& b);
DTensor operator/(const DTensor& a, const DTensor& b);

}  // namespace tessera
