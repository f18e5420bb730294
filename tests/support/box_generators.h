#pragma once
// Random shapes and boxes, small enough for the oracle that checks every element.
//
// A property that fails prints the counterexample, shrunk, and a line RC_PARAMS="reproduce=..."; running the test with
// that in its environment replays the failure. RC_PARAMS="seed=N" replays an entire run, RC_PARAMS="max_success=10000"
// runs more cases.

#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <numeric>
#include <vector>

#include "tessera/layout/box.h"

namespace tessera::testing {

using Shape = std::vector<std::int64_t>;

// Returns a number from `low` to `high`, inclusive, uniformly from the first case on (RapidCheck's ranges grow with the
// cases).
inline std::int64_t any_between(std::int64_t low, std::int64_t high) {
  return *rc::gen::resize(rc::kNominalSize, rc::gen::inRange<std::int64_t>(low, high + 1));
}

// Returns a shape of rank 0 to 4 with sizes from `least` to 5.
inline Shape any_shape(std::int64_t least = 0) {
  Shape shape(static_cast<std::size_t>(any_between(0, 4)));
  for (std::int64_t& size : shape) size = any_between(least, 5);
  return shape;
}

// Returns any box that is valid in the shape, possibly empty.
inline Box any_box(const Shape& shape) {
  Box box = Box::full(shape);
  for (std::size_t d = 0; d < shape.size(); ++d) {
    box.offsets[d] = any_between(0, shape[d]);
    box.sizes[d] = any_between(0, shape[d] - box.offsets[d]);
  }
  return box;
}

inline BoxList any_boxes(const Shape& shape, std::int64_t most = 8) {
  BoxList boxes(shape.size());
  for (std::int64_t n = any_between(0, most); n > 0; --n) boxes.push_back(any_box(shape));
  return boxes;
}

// Returns boxes in any order that partition the shape: a piece is split `splits` times.
inline std::vector<Box> any_partition(const Shape& shape, std::int64_t splits) {
  std::vector<Box> boxes = {Box::full(shape)};
  for (; splits > 0 && !shape.empty(); --splits) {
    Box& box = boxes[static_cast<std::size_t>(any_between(0, static_cast<std::int64_t>(boxes.size()) - 1))];
    const auto d = static_cast<std::size_t>(any_between(0, static_cast<std::int64_t>(shape.size()) - 1));
    Box rest = box;
    const std::int64_t kept = any_between(0, box.sizes[d]);
    box.sizes[d] = kept;
    rest.offsets[d] += kept;
    rest.sizes[d] -= kept;
    boxes.push_back(rest);
  }
  for (std::size_t i = boxes.size(); i > 1; --i) {
    std::swap(boxes[i - 1], boxes[static_cast<std::size_t>(any_between(0, static_cast<std::int64_t>(i) - 1))]);
  }
  return boxes;
}

// Returns the boxes of a regular mesh, row-major: mesh[d] boxes in dimension d, each `step` long.
inline BoxList mesh_boxes(const Shape& mesh, std::int64_t step) {
  BoxList boxes(mesh.size());
  boxes.reserve(
      static_cast<std::size_t>(std::accumulate(mesh.begin(), mesh.end(), std::int64_t{1}, std::multiplies())));
  Shape index(mesh.size(), 0);
  Box box(index, Shape(mesh.size(), step));
  for (;;) {
    for (std::size_t d = 0; d < mesh.size(); ++d) box.offsets[d] = index[d] * step;
    boxes.push_back(box);
    std::size_t d = mesh.size();
    for (; d > 0; --d) {
      if (++index[d - 1] < mesh[d - 1]) break;
      index[d - 1] = 0;
    }
    if (d == 0) return boxes;
  }
}

}  // namespace tessera::testing
