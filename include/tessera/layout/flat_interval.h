#pragma once
/// \file
/// The boxes of a flat interval of a row-major tensor: the part of a parameter that a rank of FSDP holds.
///
/// Laws: the boxes partition the interval and are in row-major order. Each is contiguous in the flat tensor, so box i
/// begins in the flat interval where box i-1 ends. There are at most 2*rank - 1 boxes (1 for rank 0).

#include <cstdint>
#include <span>
#include <vector>

#include "tessera/layout/box.h"

namespace tessera {

/// Returns the boxes of elements begin <= i < end of a row-major tensor of `shape`; none for an empty interval. Throws
/// `Error(invalid_argument)` unless 0 <= begin <= end <= numel.
std::vector<Box> boxes_of_flat_interval(std::span<const std::int64_t> shape, std::int64_t begin, std::int64_t end);

}  // namespace tessera
