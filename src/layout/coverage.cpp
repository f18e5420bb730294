#include "tessera/layout/coverage.h"

#include <algorithm>
#include <array>
#include <vector>

#include "layout/cell.h"
#include "layout/plane_sweep.h"

namespace tessera {
namespace {

std::vector<std::size_t> non_empty(const BoxList& boxes) {
  std::vector<std::size_t> members;
  members.reserve(boxes.size());
  for (std::size_t i = 0; i < boxes.size(); ++i) {
    if (!is_empty(boxes[i])) members.push_back(i);
  }
  return members;
}

// A cell whose members differ in at most two dimensions, projected onto these two. A missing dimension counts as one
// step wide.
struct Plane {
  explicit Plane(const std::vector<std::size_t>& uneven) {
    if (!uneven.empty()) x = uneven[0];
    if (uneven.size() > 1) y = uneven[1];
  }
  std::optional<std::size_t> x, y;

  Rectangle area(const Cell& cell) const {
    return {x ? cell.begin[*x] : 0, x ? cell.end[*x] : 1, y ? cell.begin[*y] : 0, y ? cell.end[*y] : 1};
  }
  std::vector<Rectangle> members(const BoxList& boxes, const Cell& cell) const {
    std::vector<Rectangle> rectangles;
    rectangles.reserve(cell.members.size());
    for (const std::size_t i : cell.members) {
      const Interval in_x = x ? clipped(boxes, i, cell, *x) : Interval{0, 1};
      const Interval in_y = y ? clipped(boxes, i, cell, *y) : Interval{0, 1};
      rectangles.push_back({in_x.begin, in_x.end, in_y.begin, in_y.end, i});
    }
    return rectangles;
  }
};

Box box_between(const std::vector<std::int64_t>& begin, const std::vector<std::int64_t>& end) {
  Box box(begin, end);
  for (std::size_t d = 0; d < begin.size(); ++d) box.sizes[d] -= begin[d];
  return box;
}

// Returns the part of `cell` before or after `tight`, in the first dimension in which there is one.
std::optional<Box> gap_around(const Cell& cell, const Cell& tight) {
  for (std::size_t d = 0; d < cell.begin.size(); ++d) {
    std::vector<std::int64_t> begin = cell.begin, end = cell.end;
    if (cell.begin[d] < tight.begin[d]) {
      end[d] = tight.begin[d];
      return box_between(begin, end);
    }
    if (tight.end[d] < cell.end[d]) {
      begin[d] = tight.end[d];
      return box_between(begin, end);
    }
  }
  return std::nullopt;
}

// Up to this many members, comparing all pairs is cheaper than another split.
constexpr std::size_t kFewMembers = 32;

std::optional<std::pair<std::size_t, std::size_t>> find_overlap_among(const BoxList& boxes,
                                                                      const std::vector<std::size_t>& members) {
  for (std::size_t b = 1; b < members.size(); ++b) {
    for (std::size_t a = 0; a < b; ++a) {
      if (overlaps(boxes[members[a]], boxes[members[b]])) return std::pair(members[a], members[b]);
    }
  }
  return std::nullopt;
}

void push_reversed(std::vector<Cell>& stack, std::vector<Cell> cells) {
  std::move(cells.rbegin(), cells.rend(), std::back_inserter(stack));
}

}  // namespace

std::optional<std::pair<std::size_t, std::size_t>> find_overlap(const BoxList& boxes) {
  if (boxes.size() < 2) return std::nullopt;
  const auto ordered = [](std::size_t a, std::size_t b) { return std::pair(std::min(a, b), std::max(a, b)); };
  std::vector<std::size_t> all = non_empty(boxes);
  if (all.size() < 2) return std::nullopt;
  const Box first(boxes[all.front()]);
  Cell space{first.offsets, first.offsets, {}};
  for (const std::size_t i : all) {
    for (std::size_t d = 0; d < boxes.rank(); ++d) {
      space.begin[d] = std::min(space.begin[d], boxes[i].offsets[d]);
      space.end[d] = std::max(space.end[d], boxes[i].offsets[d] + boxes[i].sizes[d]);
    }
  }
  space.members = std::move(all);
  std::vector<Cell> stack;
  stack.push_back(std::move(space));
  while (!stack.empty()) {
    Cell cell = std::move(stack.back());
    stack.pop_back();
    if (cell.members.size() <= kFewMembers) {
      if (const auto pair = find_overlap_among(boxes, cell.members)) return pair;
      continue;
    }
    cell = bounds(boxes, cell);
    const CellFacts facts = look_at(boxes, cell);
    if (facts.spanning) {
      const std::size_t other = cell.members[cell.members[0] == *facts.spanning ? 1 : 0];
      return ordered(*facts.spanning, other);
    }
    if (facts.uneven.size() <= 2) {
      std::vector<Rectangle> rectangles = Plane(facts.uneven).members(boxes, cell);
      if (const auto pair = find_overlap_in_plane(rectangles)) return ordered(pair->first, pair->second);
    } else {
      push_reversed(stack, split(boxes, cell, facts.uneven));
    }
  }
  return std::nullopt;
}

std::optional<Box> find_hole(std::span<const std::int64_t> shape, const BoxList& boxes) {
  if (is_empty({shape, shape})) return std::nullopt;
  const auto is_shape = [&](BoxView box) {
    return std::ranges::equal(box.sizes, shape) &&
           std::ranges::all_of(box.offsets, [](std::int64_t offset) { return offset == 0; });
  };
  if (boxes.size() == 1 && is_shape(boxes[0])) return std::nullopt;
  std::vector<Cell> stack;
  stack.push_back({std::vector<std::int64_t>(shape.size(), 0), {shape.begin(), shape.end()}, non_empty(boxes)});
  while (!stack.empty()) {
    const Cell cell = std::move(stack.back());
    stack.pop_back();
    if (cell.members.empty()) return box_between(cell.begin, cell.end);
    if (std::optional<Box> gap = gap_around(cell, bounds(boxes, cell))) return gap;
    const CellFacts facts = look_at(boxes, cell);
    if (facts.spanning) continue;
    if (facts.uneven.size() <= 2) {
      const Plane plane(facts.uneven);
      std::vector<Rectangle> rectangles = plane.members(boxes, cell);
      if (const auto hole = find_hole_in_plane(plane.area(cell), rectangles)) {
        std::vector<std::int64_t> begin = cell.begin, end = cell.end;
        if (plane.x) begin[*plane.x] = hole->begin_x, end[*plane.x] = hole->end_x;
        if (plane.y) begin[*plane.y] = hole->begin_y, end[*plane.y] = hole->end_y;
        return box_between(begin, end);
      }
    } else {
      push_reversed(stack, split(boxes, cell, facts.uneven));
    }
  }
  return std::nullopt;
}

}  // namespace tessera
