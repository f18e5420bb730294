#pragma once
/// \file
/// Where a box lies in the bytes of a chunk, and copies between the two.
///
/// A chunk is a box whose elements are stored with strides (in elements; row-major by default). Ranges are half-open.
/// Law: the ranges of a box are disjoint, in order, not adjacent, and their total is volume * element size.

#include <cstdint>
#include <span>
#include <vector>

#include "tessera/base/bytes.h"
#include "tessera/layout/box.h"

namespace tessera {

struct ByteRange {
  std::int64_t offset_bytes = 0;
  std::int64_t length_bytes = 0;
  bool operator==(const ByteRange&) const = default;
};

/// Strides, in elements, of a row-major tensor: the last is 1. A size of 0 counts as 1.
std::vector<std::int64_t> row_major_strides(std::span<const std::int64_t> sizes);

/// The byte ranges of `box` inside the row-major `chunk` that contains it, relative to the chunk's first byte, merged
/// where contiguous. Both boxes are in the tensor's coordinates.
std::vector<ByteRange> byte_ranges(BoxView box, BoxView chunk, std::int64_t element_bytes);

/// Whether `box` is one contiguous range of the row-major `chunk` that contains it; an empty box is.
/// Law: is_contiguous_in(b, c) <=> byte_ranges(b, c, n).size() <= 1.
bool is_contiguous_in(BoxView box, BoxView chunk);

/// Copies `sizes` elements between two strided memories, which must not overlap (strides in elements, >= 0; may be 0 in
/// the source). Dimensions are coalesced; what is contiguous on both sides is a memcpy; a transpose of elements, or of
/// runs, of 1, 2, 4, 8 or 16 bytes goes in squares that fit the cache.
void copy_strided(std::span<const std::int64_t> sizes, std::int64_t element_bytes, const std::uint8_t* source,
                  std::span<const std::int64_t> source_strides, std::uint8_t* destination,
                  std::span<const std::int64_t> destination_strides);

/// Cuts `box` into pieces in row-major order, each at most `limit_bytes` (but at least one element) and each contiguous
/// in the row-major `box` itself: piece i+1 begins in its bytes where piece i ends. As many whole steps as fit of the
/// outermost dimension of which one fits are a piece. An empty box has none.
std::vector<Box> split_row_major(BoxView box, std::int64_t element_bytes, std::int64_t limit_bytes);

}  // namespace tessera
