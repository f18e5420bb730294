#include "tessera/base/checked.h"

namespace tessera {

std::int64_t checked_numel(std::span<const std::int64_t> sizes, std::string_view what) {
  std::int64_t product = 1;
  bool empty = false;
  for (const std::int64_t size : sizes) {
    if (size < 0) fail(ErrorCode::corrupt, "{} has a negative size: {}, expected 0 or more", what, size);
    if (size == 0) {
      empty = true;
    } else {
      product = checked_multiply(product, size, what);
    }
  }
  return empty ? 0 : product;
}

}  // namespace tessera
