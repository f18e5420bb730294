#pragma once
/// \file
/// The boxes of a flat interval of a row-major tensor: what a rank of FSDP holds of a parameter.
///
/// Laws: the boxes partition the interval; they come in row-major order; each is contiguous in the flat tensor, so the
/// i-th box begins in the flat piece where the ones before it end. At most 2*rank - 1 boxes (1 for rank 0).

#include <cstdint>
#include <span>
#include <vector>

#include "tessera/layout/box.h"

namespace tessera {

/// The boxes of elements begin <= i < end of a row-major tensor of `shape`. 0 <= begin <= end <= numel; an empty
/// interval gives no box. Throws `Error(invalid_argument)` for an interval outside of the tensor.
std::vector<Box> boxes_of_flat_interval(std::span<const std::int64_t> shape, std::int64_t begin, std::int64_t end);

}  // namespace tessera
