#pragma once
// Reductions of contiguous elements in memory.

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <span>

#include "comm/c10d.h"
#include "tessera/base/reduce_op.h"

namespace tessera::comm {

ReduceOp reduction_of(const ::c10d::ReduceOp& op);

// Reduces `numel` elements of each source to `out`: ((x0 op x1) op x2) ..., rounded to the dtype after each; an average
// is that divided by their number. `out` may be one of the sources, but overlaps no other.
void reduce_elements(at::ScalarType dtype, ReduceOp op, void* out, std::span<const void* const> sources,
                     std::int64_t numel);

}  // namespace tessera::comm
