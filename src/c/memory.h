#pragma once
// Strided memory that a caller describes.

#include <cstdint>
#include <span>
#include <string_view>

#include "tessera/base/checked.h"
#include "tessera/base/dtype.h"
#include "tessera/layout/box.h"

namespace tessera::c {

// Returns the bytes from the first element of a box in strided memory to the end of its last; 0 if it has no elements.
inline std::uint64_t extent_bytes(BoxView box, std::span<const std::int64_t> strides, DType dtype) {
  constexpr std::string_view kWhat = "the memory of a box";
  if (is_empty(box)) return 0;
  std::int64_t elements = strides.empty() ? checked_numel(box.sizes, kWhat) : 1;
  for (std::size_t d = 0; d < strides.size(); ++d) {
    elements = checked_add(elements, checked_multiply(box.sizes[d] - 1, strides[d], kWhat), kWhat);
  }
  return static_cast<std::uint64_t>(checked_multiply(elements, dtype_size(dtype), kWhat));
}

}  // namespace tessera::c
