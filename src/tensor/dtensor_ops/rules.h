#pragma once
// Placement rules of the built-in ops (see tessera/tensor/dtensor_op.h).

#include <cstdint>
#include <optional>
#include <vector>

#include "tessera/tensor/dtensor_op.h"

namespace tessera::rules {

using Sizes = std::vector<std::int64_t>;

// Returns `dim` of `dims` dimensions, counted from the front. Throws Error(invalid_argument) if it is out of range.
std::int64_t dim_from_front(const char* op, std::int64_t dim, std::int64_t dims);
// Returns `dims` counted from the front, ascending; all dimensions if `dims` is empty.
Sizes dims_from_front(const char* op, const Sizes& dims, std::int64_t of);

// For inputs that broadcast to each other. `is_linear`: partial sums and averages need no reduction.
OpRule elementwise(const char* op, std::span<const DTensor> inputs, bool is_linear);
OpRule linear(std::span<const DTensor> inputs);
OpRule embedding(std::span<const DTensor> inputs);
// For an input that is not sharded along `unsharded_dims` (ascending), followed by replicated parameters.
OpRule along_dims(std::span<const DTensor> inputs, const Sizes& unsharded_dims);
// `partial`: the placement of the result if a reduced dimension is sharded; nullopt if it must not be sharded.
OpRule reduction(const DTensor& input, const Sizes& dims, bool keepdim, std::optional<Placement> partial);
// For `inputs[0]` [..., m, k] and `inputs[1]` [..., k, n], whose other dimensions broadcast to each other.
OpRule matmul(std::span<const DTensor> inputs);
// For tensors that are concatenated along `dim`.
OpRule cat(std::span<const DTensor> inputs, std::size_t dim);
// For inputs {x, index} of equally many dimensions.
OpRule gather(std::span<const DTensor> inputs, std::size_t dim);
// For inputs {x, index} with an index of one dimension.
OpRule index_select(std::span<const DTensor> inputs, std::size_t dim);
// For query [..., l, e], key [..., s, e] and value [..., s, v].
// If `is_causal`, the rows of the query are not sharded.
OpRule attention(std::span<const DTensor> inputs, bool is_causal);

// The dimension of the result that each dimension of the input becomes, shard by shard; nullopt if the input must not
// be sharded along it.
using DimMap = std::vector<std::optional<std::size_t>>;
// For an op that rearranges elements or leaves some out, and computes nothing.
OpRule mapped(const DTensor& input, Sizes output_size, const DimMap& map);
// Returns the placements of the result of such an op, whose input is placed as the rule requires.
Placements mapped(const Placements& placements, const DimMap& map);
// Returns the map of a view of `input` as `size`, which has as many elements: consecutive dimensions are merged or
// split, and the first of each group keeps its shards if they are even.
DimMap view_map(const DTensor& input, const Sizes& size);

}  // namespace tessera::rules
