#pragma once
/// \file
/// Ops on DTensors that read and write elements at indices, with ATen's names. Part of tessera/tensor/dtensor_ops.h.
///
/// Each returns the result of the ATen function of its name on the full tensors. Tensors of indices are of long; a
/// negative index counts from the end where ATen's does.
///
/// If x is sharded along an indexed dimension, it stays so where elements are written: each rank writes those that it
/// has. Where elements are read, each rank reads those that it has and the result is partial (sum), unless it would be
/// larger than x; then the op unshards x. Shards of other dimensions stay where they are. Partial tensors of any kind
/// stay partial, those of sums and averages also if elements are added. An index out of range throws
/// `Error(invalid_argument)`.
///
/// PyTorch: torch/distributed/tensor/_ops/_tensor_ops.py, which unshards indexed dimensions.

#include <ATen/TensorIndexing.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "tessera/base/reduce_op.h"
#include "tessera/tensor/dtensor.h"

namespace tessera::dtensor {

// --- reading

/// One index for each dimension of x, from the first; nullopt takes all of a dimension. Tensors of indices are
/// broadcast to each other, and their dimensions take the place of those that they index; they come first if one that
/// is not indexed is between these. A tensor of bool indexes as many dimensions as it has, and takes the elements where
/// it is true; every rank gets all of it for this. On a rank outside of the mesh, none is taken.
using DTensorIndices = std::vector<std::optional<DTensor>>;
DTensor index(const DTensor& x, const DTensorIndices& indices);
/// As at::Tensor::index with numbers, slices, `None`, `Ellipsis` and tensors: `index(x, {Slice(1, 3), Ellipsis, 0})`.
/// All ranks must pass the same tensors. Throws `Error(unsupported)` for a bool that is not a tensor.
DTensor index(const DTensor& x, const std::vector<at::indexing::TensorIndex>& indices);
/// Returns x[..., index[i], ...] along `dim`, for an `index` of one dimension.
DTensor index_select(const DTensor& x, std::int64_t dim, const DTensor& index);
/// Returns the elements of x at `index` along `dim`; `index` has as many dimensions as x.
DTensor gather(const DTensor& x, std::int64_t dim, const DTensor& index);
/// Returns the elements whose index along dim2 is that along dim1 plus `offset`, as the last dimension.
DTensor diagonal(const DTensor& x, std::int64_t offset = 0, std::int64_t dim1 = 0, std::int64_t dim2 = 1);

// --- writing

/// Returns x with `values`, broadcast to the size of `index(x, indices)`, at these places. If `accumulate`, adds them
/// to x instead, also those of equal places.
DTensor index_put(const DTensor& x, const DTensorIndices& indices, const DTensor& values, bool accumulate = false);
// These write to places x[..., index[i], ...] along `dim`, for an `index` of one dimension. `source` has the size of
// `index_select(x, dim, index)`.
DTensor index_add(const DTensor& x, std::int64_t dim, const DTensor& index, const DTensor& source,
                  const at::Scalar& alpha = 1);
DTensor index_copy(const DTensor& x, std::int64_t dim, const DTensor& index, const DTensor& source);
DTensor index_fill(const DTensor& x, std::int64_t dim, const DTensor& index, const at::Scalar& value);
/// Reduces the elements of `source` into x by `op`. Unless `includes_x`, an element of x that `index` refers to is
/// replaced by the reduction of its elements of `source` alone. Throws `Error(unsupported)` for sums: see `index_add`.
DTensor index_reduce(const DTensor& x, std::int64_t dim, const DTensor& index, const DTensor& source, ReduceOp op,
                     bool includes_x = true);
// These write to the places of `select`, `slice` and `diagonal`; `source` has the size of their result.
DTensor select_scatter(const DTensor& x, const DTensor& source, std::int64_t dim, std::int64_t index);
DTensor slice_scatter(const DTensor& x, const DTensor& source, std::int64_t dim, std::int64_t begin, std::int64_t end,
                      std::int64_t step = 1);
DTensor diagonal_scatter(const DTensor& x, const DTensor& source, std::int64_t offset = 0, std::int64_t dim1 = 0,
                         std::int64_t dim2 = 1);
// These write source[i, j, ...] to the place of x that is index[i, j, ...] along `dim` and i, j, ... along the others.
// `index` may be smaller than `source`, and than x along other dimensions.
DTensor scatter(const DTensor& x, std::int64_t dim, const DTensor& index, const DTensor& source);
DTensor scatter(const DTensor& x, std::int64_t dim, const DTensor& index, const at::Scalar& value);
DTensor scatter_add(const DTensor& x, std::int64_t dim, const DTensor& index, const DTensor& source);
/// As `index_reduce`, and for sums.
DTensor scatter_reduce(const DTensor& x, std::int64_t dim, const DTensor& index, const DTensor& source, ReduceOp op,
                       bool includes_x = true);

// In place: x keeps its placements, and so do other references to it. They return x, and throw `Error(unsupported)` if
// the result cannot be placed as x is.
DTensor index_put_(const DTensor& x, const DTensorIndices& indices, const DTensor& values, bool accumulate = false);
DTensor index_add_(const DTensor& x, std::int64_t dim, const DTensor& index, const DTensor& source,
                   const at::Scalar& alpha = 1);
DTensor index_copy_(const DTensor& x, std::int64_t dim, const DTensor& index, const DTensor& source);
DTensor index_fill_(const DTensor& x, std::int64_t dim, const DTensor& index, const at::Scalar& value);

}  // namespace tessera::dtensor
