#include "tessera/layout/byte_ranges.h"

#include <algorithm>
#include <cassert>

namespace tessera {
namespace {

// Returns the first dimension after which `box` is as wide as `chunk`: from it on, elements are contiguous.
std::size_t first_of_run(BoxView box, BoxView chunk) {
  std::size_t d = box.rank();
  while (d > 0 && box.sizes[d - 1] == chunk.sizes[d - 1]) --d;
  return d > 0 ? d - 1 : 0;
}

}  // namespace

std::vector<std::int64_t> row_major_strides(std::span<const std::int64_t> sizes) {
  std::vector<std::int64_t> strides(sizes.size());
  std::int64_t stride = 1;
  for (std::size_t d = sizes.size(); d-- > 0;) {
    strides[d] = stride;
    stride *= std::max<std::int64_t>(sizes[d], 1);
  }
  return strides;
}

std::vector<ByteRange> byte_ranges(BoxView box, BoxView chunk, std::int64_t element_bytes) {
  assert(contains(chunk, box));
  std::vector<ByteRange> ranges;
  if (is_empty(box)) return ranges;
  if (box.rank() == 0) {
    ranges.push_back({0, element_bytes});
    return ranges;
  }
  const std::vector<std::int64_t> strides = row_major_strides(chunk.sizes);
  const std::size_t run_dimension = first_of_run(box, chunk);
  std::int64_t offset = 0, count = 1;
  for (std::size_t d = 0; d < box.rank(); ++d) offset += (box.offsets[d] - chunk.offsets[d]) * strides[d];
  for (std::size_t d = 0; d < run_dimension; ++d) count *= box.sizes[d];
  const std::int64_t length_bytes = box.sizes[run_dimension] * strides[run_dimension] * element_bytes;
  ranges.reserve(static_cast<std::size_t>(count));
  std::vector<std::int64_t> index(run_dimension, 0);
  for (;;) {
    ranges.push_back({offset * element_bytes, length_bytes});
    std::size_t d = run_dimension;
    for (; d > 0; --d) {
      offset += strides[d - 1];
      if (++index[d - 1] < box.sizes[d - 1]) break;
      offset -= strides[d - 1] * box.sizes[d - 1];
      index[d - 1] = 0;
    }
    if (d == 0) return ranges;
  }
}

bool is_contiguous_in(BoxView box, BoxView chunk) {
  assert(contains(chunk, box));
  if (is_empty(box)) return true;
  const std::size_t run_dimension = box.rank() == 0 ? 0 : first_of_run(box, chunk);
  return std::ranges::all_of(box.sizes.first(run_dimension), [](std::int64_t size) { return size == 1; });
}

void for_each_row_major_piece(BoxView box, std::int64_t element_bytes, std::int64_t limit_bytes,
                              FunctionRef<void(const Box&)> f) {
  if (is_empty(box)) return;
  const std::int64_t limit = std::max<std::int64_t>(limit_bytes / element_bytes, 1);
  if (volume(box) <= limit) return f(Box(box));
  const std::vector<std::int64_t> strides = row_major_strides(box.sizes);
  // The outermost dimension of which one step fits; a piece is as many steps as fit.
  std::size_t outer = 0;
  while (outer < box.rank() && strides[outer] > limit) ++outer;
  if (outer == box.rank()) {
    f(Box(box));  // a scalar: the last stride of any other box is 1
    return;
  }
  const std::int64_t steps = std::min(limit / strides[outer], box.sizes[outer]);
  Box piece(box);
  std::fill_n(piece.sizes.begin(), outer, 1);
  for (;;) {
    const std::int64_t end = box.offsets[outer] + box.sizes[outer];
    for (std::int64_t begin = box.offsets[outer]; begin < end; begin += piece.sizes[outer]) {
      piece.offsets[outer] = begin;
      piece.sizes[outer] = std::min(steps, end - begin);
      f(piece);
    }
    std::size_t d = outer;
    for (; d > 0; --d) {
      if (++piece.offsets[d - 1] < box.offsets[d - 1] + box.sizes[d - 1]) break;
      piece.offsets[d - 1] = box.offsets[d - 1];
    }
    if (d == 0) return;
  }
}

std::vector<Box> split_row_major(BoxView box, std::int64_t element_bytes, std::int64_t limit_bytes) {
  std::vector<Box> pieces;
  for_each_row_major_piece(box, element_bytes, limit_bytes, [&](const Box& piece) { pieces.push_back(piece); });
  return pieces;
}

}  // namespace tessera
