#pragma once
// Geometry the slow and obvious way: one element of a small tensor at a time.

#include <cstdint>
#include <map>
#include <set>
#include <span>
#include <vector>

#include "tessera/layout/box.h"

namespace tessera::testing {

using Element = std::vector<std::int64_t>;  // an index vector

// Returns all elements of a box, in row-major order.
inline std::vector<Element> elements(BoxView box) {
  std::vector<Element> found = {Element{}};
  for (std::size_t d = 0; d < box.rank(); ++d) {
    std::vector<Element> longer;
    for (const Element& start : found) {
      for (std::int64_t i = 0; i < box.sizes[d]; ++i) {
        longer.push_back(start);
        longer.back().push_back(box.offsets[d] + i);
      }
    }
    found = std::move(longer);
  }
  return found;
}

inline std::set<Element> element_set(BoxView box) {
  const std::vector<Element> list = elements(box);
  return {list.begin(), list.end()};
}

// Counts how many of the boxes contain each element of the shape.
inline std::map<Element, int> marks(std::span<const std::int64_t> shape, const BoxList& boxes) {
  std::map<Element, int> counts;
  for (const Element& element : elements(Box::full(shape))) counts[element] = 0;
  for (std::size_t i = 0; i < boxes.size(); ++i) {
    for (const Element& element : elements(boxes[i])) ++counts.at(element);
  }
  return counts;
}

inline bool is_partition(std::span<const std::int64_t> shape, const BoxList& boxes) {
  for (const auto& [element, count] : marks(shape, boxes)) {
    if (count != 1) return false;
  }
  return true;
}

// Returns the position of an element in a row-major box that contains it.
inline std::int64_t flat_index(const Element& element, BoxView box) {
  std::int64_t index = 0;
  for (std::size_t d = 0; d < box.rank(); ++d) index = index * box.sizes[d] + element[d] - box.offsets[d];
  return index;
}

inline BoxList list_of(std::size_t rank, const std::vector<Box>& boxes) {
  BoxList list(rank);
  for (const Box& box : boxes) list.push_back(box);
  return list;
}

}  // namespace tessera::testing
