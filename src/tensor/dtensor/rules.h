#pragma once
// Placement rules of the ops that are built in (see tessera/tensor/dtensor_op.h).

#include <cstdint>
#include <optional>
#include <vector>

#include "tessera/tensor/dtensor_op.h"

namespace tessera::rules {

using Sizes = std::vector<std::int64_t>;

// `dim` of a tensor of `dims` dimensions, from the front. Throws Error(invalid_argument) if it hasn't that.
std::int64_t dim_from_front(const char* op, std::int64_t dim, std::int64_t dims);
// All of them if none are given, ascending.
Sizes dims_from_front(const char* op, const Sizes& dims, std::int64_t of);

// Of inputs that broadcast to each other; `is_linear`: sums and averages of them are those of the results.
OpRule elementwise(const char* op, std::span<const DTensor> inputs, bool is_linear);
OpRule matmul(std::span<const DTensor> inputs);
OpRule linear(std::span<const DTensor> inputs);
OpRule embedding(std::span<const DTensor> inputs);
// Of an input whose `whole_dims` (ascending) aren't cut, and of parameters for these.
OpRule along_dims(std::span<const DTensor> inputs, const Sizes& whole_dims);
// `partial`: how the result is where a dimension is cut over which is reduced; nothing if it can't be.
OpRule reduction(const DTensor& input, const Sizes& dims, bool keepdim, std::optional<Placement> partial);
OpRule transpose(const DTensor& input, std::int64_t dim0, std::int64_t dim1);

}  // namespace tessera::rules
