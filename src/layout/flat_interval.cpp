#include "tessera/layout/flat_interval.h"

#include <algorithm>

#include "tessera/base/checked.h"
#include "tessera/base/error.h"
#include "tessera/layout/byte_ranges.h"

namespace tessera {

std::vector<Box> boxes_of_flat_interval(std::span<const std::int64_t> shape, std::int64_t begin, std::int64_t end) {
  const std::int64_t numel = checked_numel(shape, "number of elements of a flat interval's tensor");
  if (begin < 0 || end < begin || end > numel) {
    fail(ErrorCode::invalid_argument, "flat interval [{}, {}) of shape {}: expected 0 <= begin <= end <= {}", begin,
         end, shape_to_string(shape), numel);
  }
  std::vector<Box> boxes;
  if (shape.empty()) {
    if (begin < end) boxes.emplace_back();
    return boxes;
  }
  const std::vector<std::int64_t> strides = row_major_strides(shape);
  while (begin < end) {
    // The outermost dimension in which a full step begins here and ends within the interval; the last one always
    // qualifies.
    std::size_t d = 0;
    while (begin % strides[d] != 0 || strides[d] > end - begin) ++d;
    Box box = Box::full(shape);
    for (std::size_t outer = 0; outer <= d; ++outer) {
      box.offsets[outer] = begin / strides[outer] % shape[outer];
      box.sizes[outer] = 1;
    }
    box.sizes[d] = std::min((end - begin) / strides[d], shape[d] - box.offsets[d]);
    begin += box.sizes[d] * strides[d];
    boxes.push_back(std::move(box));
  }
  return boxes;
}

}  // namespace tessera
