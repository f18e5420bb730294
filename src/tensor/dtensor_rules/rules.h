#pragma once
// Placement rules of the built-in ops (see tessera/tensor/dtensor_op.h).

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "tessera/tensor/dtensor_op.h"

namespace tessera::rules {

using Sizes = std::vector<std::int64_t>;

// Returns `dim` of `dims` dimensions, counted from the front. Throws Error(invalid_argument) if it is out of range.
std::int64_t dim_from_front(const char* op, std::int64_t dim, std::int64_t dims);
// Returns `dims` counted from the front, ascending; all dimensions if `dims` is empty. As in ATen, 0 and -1 are valid
// for a tensor without dimensions; for it, this returns none.
Sizes dims_from_front(const char* op, const Sizes& dims, std::int64_t of);

// Returns the size to which both are broadcast; nullopt if they do not broadcast to each other.
std::optional<Sizes> broadcast(const Sizes& a, const Sizes& b);
// Throws Error(invalid_argument) that names the sizes of the inputs and what was expected.
[[noreturn]] void refuse_sizes(const char* op, std::span<const DTensor> inputs, std::string_view expected);

// Which partial inputs an op by elements takes without reducing them. Sums and averages are kept by a linear function,
// maxima and minima by a monotonic one. Maxima and minima are reduced if an input requires grad, whose gradient depends
// on which rank's elements are the extremes, and if results of integers might wrap around.
enum class Linearity : std::uint8_t {
  none,
  linear,      // in all inputs together
  sum,         // a + b
  difference,  // a - b
  product,     // a * b
  quotient,    // a / b
  maximum,     // the greater of a and b
  minimum,
  increasing,         // of one input: f(a) <= f(b) if a <= b
  increasing_linear,  // both
  decreasing_linear,
  shifted,  // a plus a number
};

// For inputs that broadcast to each other.
OpRule elementwise(const char* op, std::span<const DTensor> inputs, Linearity linearity);
OpRule embedding(std::span<const DTensor> inputs);
// For an input that is not sharded along `unsharded_dims` (ascending), followed by replicated parameters.
OpRule along_dims(std::span<const DTensor> inputs, const Sizes& unsharded_dims);
// `partial`: the placement of the result if a reduced dimension is sharded; nullopt if it must not be sharded.
OpRule reduction(const DTensor& input, const Sizes& dims, bool keepdim, std::optional<Placement> partial);

// The dimensions of each factor and of the result of a product, by label. Dimensions of the same label are the same
// index; the product is summed over the labels that the result lacks. A dimension of size 1 is broadcast.
struct ProductLabels {
  std::vector<std::vector<int>> factors;
  std::vector<int> result;
  const char* expected_sizes = "equal lengths, or 1, of the dimensions of one index";  // for an error
};
// Along a mesh dimension, one label can be sharded, or one factor partial. An input after the factors is added to the
// product, broadcast to it.
OpRule product(const char* op, std::span<const DTensor> inputs, const ProductLabels& labels);
// For [..., m, k] and [..., k, n], whose other dimensions broadcast to each other.
OpRule matmul(std::span<const DTensor> inputs);
// For x [..., in], weight [out, in] and perhaps bias [out].
OpRule linear(std::span<const DTensor> inputs);
// Returns the labels of an einsum `equation` of tensors with `dims` dimensions. Throws Error(invalid_argument) if it is
// no equation of as many tensors.
ProductLabels einsum_labels(std::string_view equation, const std::vector<std::size_t>& dims);

// For tensors that are concatenated along `dim`. As in ATen, those of size [0] are left out if there are others.
OpRule cat(std::span<const DTensor> inputs, std::size_t dim);
// Returns which tensor is the first that is not left out.
std::size_t first_of_cat(std::span<const DTensor> inputs);
// For query [..., l, e], key [..., s, e] and value [..., s, v].
// If `is_causal`, the rows of the query are not sharded.
OpRule attention(std::span<const DTensor> inputs, bool is_causal);

// The dimension of the result that each dimension of the input becomes, shard by shard; nullopt if the input must not
// be sharded along it.
using DimMap = std::vector<std::optional<std::size_t>>;
// For an op that rearranges elements or leaves some out, and computes nothing. Partial inputs of a kind that is in
// `reduced` must be reduced first.
OpRule mapped(const DTensor& input, Sizes output_size, const DimMap& map, std::span<const ReduceOp> reduced = {});
// The kinds of partial tensors that a linear op must reduce.
inline constexpr std::array<ReduceOp, 3> kNotLinear = {ReduceOp::product, ReduceOp::min, ReduceOp::max};
// Returns the placements of the result of such an op, whose input is placed as the rule requires.
Placements mapped(const Placements& placements, const DimMap& map);

// For a view of `input` as `size`, which has as many elements: consecutive dimensions are merged or split.
OpRule view(const DTensor& input, const Sizes& size);
// Returns the placements of such a view, by mesh dimension; nullopt where the input must be unsharded first.
std::vector<std::optional<Placement>> view_placements(const DTensor& input, const Sizes& size);

}  // namespace tessera::rules
