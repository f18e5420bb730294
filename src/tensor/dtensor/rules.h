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
OpRule matmul(std::span<const DTensor> inputs);
OpRule linear(std::span<const DTensor> inputs);
OpRule embedding(std::span<const DTensor> inputs);
// For an input that is not sharded along `unsharded_dims` (ascending), followed by replicated parameters.
OpRule along_dims(std::span<const DTensor> inputs, const Sizes& unsharded_dims);
// `partial`: the placement of the result if a reduced dimension is sharded; nullopt if it must not be sharded.
OpRule reduction(const DTensor& input, const Sizes& dims, bool keepdim, std::optional<Placement> partial);
OpRule transpose(const DTensor& input, std::int64_t dim0, std::int64_t dim1);

}  // namespace tessera::rules
