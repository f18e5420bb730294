#include "tessera/layout/sharding.h"

#include <algorithm>

#include "tessera/base/error.h"

namespace tessera {

BoxList chunk_boxes(std::span<const std::int64_t> shape, std::int64_t dim, std::int64_t ranks) {
  if (ranks < 1) {
    fail(ErrorCode::invalid_argument, "shard shape {} over {} ranks: expected at least 1", shape_to_string(shape),
         ranks);
  }
  BoxList boxes(shape.size());
  Box box = Box::full(shape);
  if (shape.empty()) {
    boxes.push_back(box);
    return boxes;
  }
  const auto rank = static_cast<std::int64_t>(shape.size());
  if (dim < -rank || dim >= rank) {
    fail(ErrorCode::invalid_argument, "shard shape {} in dimension {}: expected {} to {}", shape_to_string(shape), dim,
         -rank, rank - 1);
  }
  const auto d = static_cast<std::size_t>(dim < 0 ? dim + rank : dim);
  const std::int64_t rows = shape[d] / ranks + (shape[d] % ranks != 0 ? 1 : 0);
  std::int64_t begin = 0;
  for (std::int64_t i = 0; i < ranks; ++i) {
    box.offsets[d] = begin;
    box.sizes[d] = std::min(rows, shape[d] - begin);
    boxes.push_back(box);
    begin += box.sizes[d];
  }
  return boxes;
}

}  // namespace tessera
