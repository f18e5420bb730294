#pragma once
/// \file
/// The bytes of a box inside a chunk, and copies between strided memory.
///
/// A chunk is a box whose elements are stored with strides (in elements; row-major by default). Ranges are half-open.
/// Law: the ranges of a box are disjoint, ascending and not adjacent, and their lengths add up to volume * element
/// size.

#include <cstdint>
#include <span>
#include <vector>

#include "tessera/base/bytes.h"
#include "tessera/base/function_ref.h"
#include "tessera/layout/box.h"

namespace tessera {

/// The bytes offset_bytes <= i < offset_bytes + length_bytes.
struct ByteRange {
  std::int64_t offset_bytes = 0;
  std::int64_t length_bytes = 0;
  bool operator==(const ByteRange&) const = default;
};

/// Returns the strides, in elements, of a row-major tensor. The last stride is 1. A size of 0 counts as 1.
std::vector<std::int64_t> row_major_strides(std::span<const std::int64_t> sizes);

/// Returns the byte ranges of `box` inside the row-major `chunk` that contains it. Ranges are relative to the chunk's
/// first byte and merged where contiguous. Both boxes are in the tensor's coordinates.
std::vector<ByteRange> byte_ranges(BoxView box, BoxView chunk, std::int64_t element_bytes);

/// Returns whether `box` is one contiguous range of the row-major `chunk` that contains it. True for an empty box. Law:
/// is_contiguous_in(b, c) <=> byte_ranges(b, c, n).size() <= 1.
bool is_contiguous_in(BoxView box, BoxView chunk);

/// Copies a block of shape `sizes` between two strided memories that must not overlap. Strides are in elements and >=
/// 0; those of the source may be 0. Dimensions are coalesced, and a block that is contiguous on both sides is one
/// memcpy. A transpose of elements, or of runs of elements, of 1, 2, 4, 8 or 16 bytes is copied in tiles that fit the
/// cache.
void copy_strided(std::span<const std::int64_t> sizes, std::int64_t element_bytes, const std::uint8_t* source,
                  std::span<const std::int64_t> source_strides, std::uint8_t* destination,
                  std::span<const std::int64_t> destination_strides);

/// Calls `f` with the pieces of `box`, in row-major order. Each piece has at most `limit_bytes` (but at least one
/// element) and is contiguous in the row-major `box`: piece i+1 begins at the byte where piece i ends. With d the
/// outermost dimension of which one step fits, a piece is as many steps of d as fit. An empty box has no pieces.
void for_each_row_major_piece(BoxView box, std::int64_t element_bytes, std::int64_t limit_bytes,
                              FunctionRef<void(const Box&)> f);

/// Returns these pieces.
std::vector<Box> split_row_major(BoxView box, std::int64_t element_bytes, std::int64_t limit_bytes);

}  // namespace tessera
