#pragma once
/// \file
/// The built-in ops on DTensors, with ATen's names.
///
/// Each gives what the ATen function of its name gives on the full tensors. An op marked "linear" takes partial inputs
/// (sum or average) without reducing them first. All are collectives of the mesh's ranks. They throw as `call` does.
///
/// `register_placement_rule` replaces the rule of an op, by its name ("relu"). The ops on sharded tensors
/// (tessera/tensor/ops.h) overload with these. PyTorch: torch/distributed/tensor/_ops.

#include <ATen/TensorIndexing.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tessera/tensor/dtensor.h"
#include "tessera/tensor/philox_generator.h"

namespace tessera::dtensor {

// --- element by element

DTensor abs(const DTensor& x);
DTensor cos(const DTensor& x);
DTensor erf(const DTensor& x);
DTensor exp(const DTensor& x);
DTensor gelu(const DTensor& x);
DTensor log(const DTensor& x);
DTensor neg(const DTensor& x);  ///< linear
DTensor reciprocal(const DTensor& x);
DTensor relu(const DTensor& x);
DTensor rsqrt(const DTensor& x);
DTensor sigmoid(const DTensor& x);
DTensor silu(const DTensor& x);
DTensor sin(const DTensor& x);
DTensor sqrt(const DTensor& x);
DTensor square(const DTensor& x);
DTensor tanh(const DTensor& x);
DTensor clamp(const DTensor& x, const std::optional<at::Scalar>& min, const std::optional<at::Scalar>& max);
DTensor clone(const DTensor& x);                     ///< linear
DTensor to(const DTensor& x, at::ScalarType dtype);  ///< linear if every value has an equal in a floating-point `dtype`
DTensor logical_not(const DTensor& x);

// Both tensors are broadcast to a common size.
DTensor add(const DTensor& a, const DTensor& b);  ///< linear
DTensor sub(const DTensor& a, const DTensor& b);  ///< linear
DTensor mul(const DTensor& a, const DTensor& b);
DTensor div(const DTensor& a, const DTensor& b);
DTensor maximum(const DTensor& a, const DTensor& b);
DTensor minimum(const DTensor& a, const DTensor& b);
DTensor add(const DTensor& a, const at::Scalar& b);
DTensor sub(const DTensor& a, const at::Scalar& b);
DTensor mul(const DTensor& a, const at::Scalar& b);  ///< linear
DTensor div(const DTensor& a, const at::Scalar& b);  ///< linear
DTensor pow(const DTensor& a, const at::Scalar& exponent);

// Comparisons; the results are bool.
DTensor eq(const DTensor& a, const DTensor& b);
DTensor ne(const DTensor& a, const DTensor& b);
DTensor lt(const DTensor& a, const DTensor& b);
DTensor le(const DTensor& a, const DTensor& b);
DTensor gt(const DTensor& a, const DTensor& b);
DTensor ge(const DTensor& a, const DTensor& b);
DTensor eq(const DTensor& a, const at::Scalar& b);
DTensor ne(const DTensor& a, const at::Scalar& b);
DTensor lt(const DTensor& a, const at::Scalar& b);
DTensor le(const DTensor& a, const at::Scalar& b);
DTensor gt(const DTensor& a, const at::Scalar& b);
DTensor ge(const DTensor& a, const at::Scalar& b);

/// All three are broadcast to a common size; `condition` is bool.
DTensor where(const DTensor& condition, const DTensor& a, const DTensor& b);
DTensor masked_fill(const DTensor& x, const DTensor& mask, const at::Scalar& value);

/// Any other op of this kind: `compute` computes each element of the result from the elements of the inputs at the same
/// place, after broadcasting. For example, `pointwise("atan2", {{a, b}}, f)` with an `f` that calls `at::atan2`.
DTensor pointwise(const std::string& op, const std::vector<DTensor>& inputs,
                  const std::function<at::Tensor(std::span<const DTensor> inputs)>& compute);

// In place: `x` keeps its placements, and so do other references to it. They return `x`. They throw
// `Error(unsupported)` if the result cannot be placed as `x` is: for all but linear ones, if `x` is partial.
DTensor add_(const DTensor& x, const DTensor& b);  ///< linear
DTensor sub_(const DTensor& x, const DTensor& b);  ///< linear
DTensor mul_(const DTensor& x, const DTensor& b);
DTensor div_(const DTensor& x, const DTensor& b);
DTensor add_(const DTensor& x, const at::Scalar& b);
DTensor sub_(const DTensor& x, const at::Scalar& b);
DTensor mul_(const DTensor& x, const at::Scalar& b);   ///< linear
DTensor div_(const DTensor& x, const at::Scalar& b);   ///< linear
DTensor copy_(const DTensor& x, const DTensor& from);  ///< linear
DTensor fill_(const DTensor& x, const at::Scalar& value);
DTensor zero_(const DTensor& x);  ///< linear
DTensor masked_fill_(const DTensor& x, const DTensor& mask, const at::Scalar& value);

// --- products

/// Multiplies [..., m, k] by [..., k, n]; the other dimensions are broadcast to each other. A tensor of one dimension
/// is a row on the left and a column on the right. Along a mesh dimension, it can shard the rows of a, the columns of
/// b, the other dimensions, or both tensors along k, which makes the result partial.
DTensor matmul(const DTensor& a, const DTensor& b);
/// Returns beta * x + alpha * matmul(a, b); x is broadcast. Also for batches, as at::baddbmm.
DTensor addmm(const DTensor& x, const DTensor& a, const DTensor& b, const at::Scalar& beta = 1,
              const at::Scalar& alpha = 1);
/// x is [..., in], weight [out, in], bias [out]. If the weight is sharded by rows, the result is sharded along its last
/// dimension (column-wise parallel). If the weight is sharded by columns, and x along its last dimension, the result is
/// partial (row-wise parallel).
DTensor linear(const DTensor& x, const DTensor& weight, const std::optional<DTensor>& bias = std::nullopt);
/// weight is [rows, width]; ids are of any shape, of long. If the weight is sharded by rows, each rank looks up the ids
/// of its rows and the result is partial; in this case every rank throws `Error(invalid_argument)` for an id that is
/// not a row. If the weight is sharded by columns, so is the result. Row `padding_idx` gets no gradient; -1 means no
/// such row.
DTensor embedding(const DTensor& weight, const DTensor& ids, std::int64_t padding_idx = -1);
/// Returns softmax(query @ key^T / sqrt(e)) @ value for a query [..., l, e], a key [..., s, e] and a value [..., s, v].
/// If `is_causal`, row i attends to the first i + 1 keys only. Shards of the leading dimensions stay where they are,
/// for example those of heads; shards of the query's rows only if it is not causal.
DTensor scaled_dot_product_attention(const DTensor& query, const DTensor& key, const DTensor& value,
                                     bool is_causal = false);

// --- along dimensions

/// Normalizes over the last dimensions, whose sizes must be `normalized_shape`. The op unshards these dimensions.
DTensor layer_norm(const DTensor& x, const std::vector<std::int64_t>& normalized_shape,
                   const std::optional<DTensor>& weight = std::nullopt,
                   const std::optional<DTensor>& bias = std::nullopt, double eps = 1e-5);
/// As above, divides by the root of the mean square instead: x * rsqrt(mean(x^2) + eps) * weight. `eps` is by default
/// the smallest number e of the dtype with 1 + e != 1.
DTensor rms_norm(const DTensor& x, const std::vector<std::int64_t>& normalized_shape,
                 const std::optional<DTensor>& weight = std::nullopt, std::optional<double> eps = std::nullopt);
// If x is sharded along `dim`, it stays so: the ranks exchange maxima and sums only.
DTensor softmax(const DTensor& x, std::int64_t dim);
DTensor log_softmax(const DTensor& x, std::int64_t dim);
// Reduce over `dims`, or over all dimensions if empty. If x is sharded along one of them, the result is partial.
DTensor sum(const DTensor& x, const std::vector<std::int64_t>& dims = {}, bool keepdim = false);   ///< linear
DTensor mean(const DTensor& x, const std::vector<std::int64_t>& dims = {}, bool keepdim = false);  ///< linear
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
/// elements that are not 0 if p is 0. The gradient of a norm of 0 is 0.
DTensor vector_norm(const DTensor& x, double p = 2, const std::vector<std::int64_t>& dims = {}, bool keepdim = false);
// These unshard `dim`.
DTensor argmax(const DTensor& x, std::int64_t dim, bool keepdim = false);
DTensor argmin(const DTensor& x, std::int64_t dim, bool keepdim = false);
DTensor cumsum(const DTensor& x, std::int64_t dim);
DTensor cumprod(const DTensor& x, std::int64_t dim);
DTensor flip(const DTensor& x, const std::vector<std::int64_t>& dims);
struct ValuesAndIndices {
  DTensor values, indices;
};
ValuesAndIndices max(const DTensor& x, std::int64_t dim, bool keepdim = false);
ValuesAndIndices min(const DTensor& x, std::int64_t dim, bool keepdim = false);
ValuesAndIndices sort(const DTensor& x, std::int64_t dim = -1, bool descending = false);
ValuesAndIndices topk(const DTensor& x, std::int64_t k, std::int64_t dim = -1, bool largest = true);

/// Any other op of this kind: `compute` computes along `dims` of the first input, for each place in the other
/// dimensions by itself, and the result has the same size. The op unshards these dimensions, and replicates the other
/// inputs.
DTensor along_dims(const std::string& op, const std::vector<DTensor>& inputs, const std::vector<std::int64_t>& dims,
                   const std::function<at::Tensor(std::span<const DTensor> inputs)>& compute);

// --- views: these rearrange elements, and are linear for every kind of partial. Unlike ATen's, a result may share
// memory with x or not.

/// One of `size` may be -1. Merging and splitting dimensions keeps the shards of the first dimension of each group if
/// they are even (their length is divisible by the ranks); the op unshards others. `reshape` is the same.
DTensor view(const DTensor& x, std::vector<std::int64_t> size);
DTensor reshape(const DTensor& x, std::vector<std::int64_t> size);
DTensor flatten(const DTensor& x, std::int64_t start_dim = 0, std::int64_t end_dim = -1);
DTensor transpose(const DTensor& x, std::int64_t dim0, std::int64_t dim1);
DTensor permute(const DTensor& x, const std::vector<std::int64_t>& dims);
DTensor unsqueeze(const DTensor& x, std::int64_t dim);
/// Removes `dim` if its size is 1.
DTensor squeeze(const DTensor& x, std::int64_t dim);
/// Repeats dimensions of size 1, and new ones in front; -1 leaves a dimension as it is.
DTensor expand(const DTensor& x, const std::vector<std::int64_t>& size);

// --- joining and selecting: as above. They unshard the dimension that they change.

DTensor cat(const std::vector<DTensor>& tensors, std::int64_t dim = 0);
DTensor stack(const std::vector<DTensor>& tensors, std::int64_t dim = 0);
std::vector<DTensor> split(const DTensor& x, std::int64_t size, std::int64_t dim = 0);
std::vector<DTensor> split(const DTensor& x, const std::vector<std::int64_t>& sizes, std::int64_t dim = 0);
std::vector<DTensor> chunk(const DTensor& x, std::int64_t chunks, std::int64_t dim = 0);
/// Begin and end count from the end of the dimension if negative, and are limited to it. step > 0.
DTensor slice(const DTensor& x, std::int64_t dim, std::int64_t begin, std::int64_t end, std::int64_t step = 1);
DTensor narrow(const DTensor& x, std::int64_t dim, std::int64_t begin, std::int64_t length);
DTensor select(const DTensor& x, std::int64_t dim, std::int64_t index);
/// Returns select(x, dim, i) for each i.
std::vector<DTensor> unbind(const DTensor& x, std::int64_t dim = 0);
/// As at::Tensor::index with numbers, slices, `None` and `Ellipsis`: `index(x, {Slice(1, 3), Ellipsis, 0})`. Throws
/// `Error(unsupported)` for tensors of indices: see `index_select` and `gather`.
DTensor index(const DTensor& x, const std::vector<at::indexing::TensorIndex>& indices);
/// Returns x[..., index[i], ...] along `dim`, for an `index` of one dimension, of long.
DTensor index_select(const DTensor& x, std::int64_t dim, const DTensor& index);
/// Returns the elements of x whose place along `dim` is `index`. If x is sharded along `dim`, each rank looks up the
/// elements that it has and the result is partial.
DTensor gather(const DTensor& x, std::int64_t dim, const DTensor& index);

// --- loss and dropout

enum class Reduction : std::uint8_t { none, mean, sum };

struct LossOptions {
  std::optional<DTensor> weight = std::nullopt;  ///< of each class: [classes]
  std::int64_t ignore_index = -100;              ///< a target without loss and gradient
  Reduction reduction = Reduction::mean;
  double label_smoothing = 0;  ///< of cross_entropy
};
/// x is [n, classes, ...] or [classes], target [n, ...] or [], of long, with classes. If x is sharded along its
/// classes, it stays so ("loss parallel"): the ranks exchange a few numbers for each target. PyTorch: loss_parallel in
/// torch/distributed/tensor/parallel/loss.py.
DTensor nll_loss(const DTensor& x, const DTensor& target, const LossOptions& options = {});
DTensor cross_entropy(const DTensor& x, const DTensor& target, const LossOptions& options = {});
DTensor mse_loss(const DTensor& x, const DTensor& target, Reduction reduction = Reduction::mean);

/// Sets each element to 0 with probability p and divides the others by 1 - p, with the same elements on any mesh.
/// Linear. The generator must be in the same state on all ranks; it advances by the elements of x. PyTorch: dropout.
DTensor dropout(const DTensor& x, double p, PhiloxGenerator& generator);

/// Returns whether sizes, dtypes and all elements are equal, the same on all ranks of the mesh.
bool equal(const DTensor& a, const DTensor& b);

}  // namespace tessera::dtensor

namespace tessera {

DTensor operator+(const DTensor& a, const DTensor& b);
DTensor operator-(const DTensor& a, const DTensor& b);
DTensor operator*(const DTensor& a, const DTensor& b);
DTensor operator/(const DTensor& a, const DTensor& b);
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
