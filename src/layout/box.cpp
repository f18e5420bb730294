#include "tessera/layout/box.h"

#include <algorithm>
#include <cassert>
#include <ostream>

#include "tessera/base/error.h"

namespace tessera {

Box Box::full(std::span<const std::int64_t> shape) {
  return {std::vector<std::int64_t>(shape.size(), 0), std::vector<std::int64_t>(shape.begin(), shape.end())};
}

bool operator==(BoxView a, BoxView b) {
  return std::ranges::equal(a.offsets, b.offsets) && std::ranges::equal(a.sizes, b.sizes);
}

std::int64_t volume(BoxView box) {
  if (is_empty(box)) return 0;
  std::int64_t product = 1;
  for (const std::int64_t size : box.sizes) product *= size;
  return product;
}

bool is_empty(BoxView box) { return std::ranges::find(box.sizes, 0) != box.sizes.end(); }

bool overlaps(BoxView a, BoxView b) {
  assert(a.rank() == b.rank());
  for (std::size_t d = 0; d < a.rank(); ++d) {
    const std::int64_t begin = std::max(a.offsets[d], b.offsets[d]);
    const std::int64_t end = std::min(a.offsets[d] + a.sizes[d], b.offsets[d] + b.sizes[d]);
    if (begin >= end) return false;
  }
  return true;
}

std::optional<Box> intersect(BoxView a, BoxView b) {
  if (!overlaps(a, b)) return std::nullopt;
  Box shared(std::vector<std::int64_t>(a.rank()), std::vector<std::int64_t>(a.rank()));
  for (std::size_t d = 0; d < a.rank(); ++d) {
    shared.offsets[d] = std::max(a.offsets[d], b.offsets[d]);
    shared.sizes[d] = std::min(a.offsets[d] + a.sizes[d], b.offsets[d] + b.sizes[d]) - shared.offsets[d];
  }
  return shared;
}

std::vector<Box> subtract(BoxView a, BoxView b) {
  if (is_empty(a)) return {};
  const std::optional<Box> shared = intersect(a, b);
  if (!shared) return {Box(a)};
  std::vector<Box> rest;
  Box middle(a);  // what remains of a; loses the parts below and above `shared` in one dimension after another
  for (std::size_t d = 0; d < a.rank(); ++d) {
    const std::int64_t begin = middle.offsets[d], end = begin + middle.sizes[d];
    const std::int64_t shared_end = shared->offsets[d] + shared->sizes[d];
    for (const auto& [from, to] : {std::pair(begin, shared->offsets[d]), std::pair(shared_end, end)}) {
      if (from == to) continue;
      middle.offsets[d] = from;
      middle.sizes[d] = to - from;
      rest.push_back(middle);
    }
    middle.offsets[d] = shared->offsets[d];
    middle.sizes[d] = shared->sizes[d];
  }
  return rest;
}

bool contains(BoxView outer, BoxView inner) {
  if (is_empty(inner)) return true;
  assert(outer.rank() == inner.rank());
  for (std::size_t d = 0; d < outer.rank(); ++d) {
    if (inner.offsets[d] < outer.offsets[d]) return false;
    if (inner.offsets[d] + inner.sizes[d] > outer.offsets[d] + outer.sizes[d]) return false;
  }
  return true;
}

bool is_valid(BoxView box, std::span<const std::int64_t> shape) {
  if (box.offsets.size() != shape.size() || box.sizes.size() != shape.size()) return false;
  for (std::size_t d = 0; d < shape.size(); ++d) {
    if (box.offsets[d] < 0 || box.sizes[d] < 0 || box.sizes[d] > shape[d]) return false;
    if (box.offsets[d] > shape[d] - box.sizes[d]) return false;
  }
  return true;
}

std::string to_string(BoxView box) {
  if (box.rank() == 0) return "[]";
  std::string text;
  for (std::size_t d = 0; d < box.rank(); ++d) {
    std::int64_t end = 0;  // a box that is refused may have one that overflows
    const bool overflows = __builtin_add_overflow(box.offsets[d], box.sizes[d], &end);
    text += overflows ? fmt::format("{}[{}, + {})", d == 0 ? "" : "x", box.offsets[d], box.sizes[d])
                      : fmt::format("{}[{}, {})", d == 0 ? "" : "x", box.offsets[d], end);
  }
  return text;
}

std::ostream& operator<<(std::ostream& out, const Box& box) { return out << to_string(box); }

std::string shape_to_string(std::span<const std::int64_t> shape) {
  std::string text = "[";
  for (std::size_t d = 0; d < shape.size(); ++d) text += fmt::format("{}{}", d == 0 ? "" : ", ", shape[d]);
  return text + "]";
}

BoxList::BoxList(std::initializer_list<Box> boxes) : rank_(boxes.size() == 0 ? 0 : boxes.begin()->rank()) {
  reserve(boxes.size());
  for (const Box& box : boxes) push_back(box);
}

void BoxList::push_back(BoxView box) {
  assert(box.offsets.size() == rank_ && box.sizes.size() == rank_);
  coordinates_.insert(coordinates_.end(), box.offsets.begin(), box.offsets.end());
  coordinates_.insert(coordinates_.end(), box.sizes.begin(), box.sizes.end());
  ++count_;
}

}  // namespace tessera
