#include "layout/plane_sweep.h"

#include <algorithm>
#include <map>
#include <vector>

namespace tessera {
namespace {

bool begins_before(const Rectangle& a, const Rectangle& b) { return a.begin_x < b.begin_x; }

// Boxes are usually in order already.
void sort_by_begin(std::span<Rectangle> rectangles) {
  if (!std::is_sorted(rectangles.begin(), rectangles.end(), begins_before)) {
    std::sort(rectangles.begin(), rectangles.end(), begins_before);
  }
}

// Counts how often each interval of a row is covered. A node counts the covers of its entire interval that do not cover
// its parent's, so that a cover is added or removed in O(log n) nodes.
class CoverCounts {
 public:
  // `edges`, ascending, are the ends of the intervals.
  explicit CoverCounts(std::vector<std::int64_t> edges) : edges_(std::move(edges)) {
    while (leaves_ < edges_.size() - 1) leaves_ *= 2;
    own_.assign(2 * leaves_, 0);
    least_.assign(2 * leaves_, 0);
    for (std::size_t i = edges_.size() - 1; i < leaves_; ++i)
      own_[leaves_ + i] = least_[leaves_ + i] = 1;  // no interval
    for (std::size_t node = leaves_; node-- > 1;) least_[node] = std::min(least_[2 * node], least_[2 * node + 1]);
  }

  void add(std::int64_t begin, std::int64_t end, std::int32_t change) {
    const std::size_t first = leaves_ + position(begin), last = leaves_ + position(end) - 1;
    for (std::size_t low = first, high = last + 1; low < high; low /= 2, high /= 2) {
      if (low % 2 == 1) change_node(low++, change);
      if (high % 2 == 1) change_node(--high, change);
    }
    update_above(first);
    update_above(last);
  }

  bool all_covered() const { return least_[1] > 0; }

  // Returns the first run of uncovered intervals. There must be one.
  std::pair<std::int64_t, std::int64_t> first_uncovered() const {
    std::size_t node = 1;
    while (node < leaves_) node = 2 * node + (least_[2 * node] == 0 ? 0 : 1);
    const std::size_t first = node - leaves_;
    std::size_t end = first + 1;
    while (end + 1 < edges_.size() && !covered(end)) ++end;
    return {edges_[first], edges_[end]};
  }

 private:
  std::size_t position(std::int64_t edge) const {
    return static_cast<std::size_t>(std::ranges::lower_bound(edges_, edge) - edges_.begin());
  }
  void change_node(std::size_t node, std::int32_t change) {
    own_[node] += change;
    least_[node] += change;
  }
  void update_above(std::size_t node) {
    for (node /= 2; node > 0; node /= 2) least_[node] = own_[node] + std::min(least_[2 * node], least_[2 * node + 1]);
  }
  bool covered(std::size_t leaf) const {
    for (std::size_t node = leaves_ + leaf; node > 0; node /= 2) {
      if (own_[node] > 0) return true;
    }
    return false;
  }

  std::vector<std::int64_t> edges_;
  std::size_t leaves_ = 1;
  std::vector<std::int32_t> own_;    // covers of the node's entire interval
  std::vector<std::int32_t> least_;  // own_ plus the smallest cover below it
};

std::vector<std::int64_t> edges_in_y(const Rectangle& area, std::span<const Rectangle> rectangles) {
  std::vector<std::int64_t> edges = {area.begin_y, area.end_y};
  for (const Rectangle& rectangle : rectangles) {
    edges.push_back(rectangle.begin_y);
    edges.push_back(rectangle.end_y);
  }
  std::ranges::sort(edges);
  edges.erase(std::unique(edges.begin(), edges.end()), edges.end());
  return edges;
}

}  // namespace

std::optional<std::pair<std::size_t, std::size_t>> find_overlap_in_plane(std::span<Rectangle> rectangles) {
  sort_by_begin(rectangles);
  // By begin_y, disjoint in y. A rectangle that the sweep has left stays until another takes its place.
  std::map<std::int64_t, const Rectangle*> crossed;
  for (const Rectangle& rectangle : rectangles) {
    auto next = crossed.lower_bound(rectangle.begin_y);
    if (next != crossed.begin() && std::prev(next)->second->end_y > rectangle.begin_y) --next;
    while (next != crossed.end() && next->first < rectangle.end_y) {
      if (next->second->end_x > rectangle.begin_x) return std::pair(next->second->id, rectangle.id);
      next = crossed.erase(next);
    }
    crossed.emplace_hint(next, rectangle.begin_y, &rectangle);
  }
  return std::nullopt;
}

std::optional<Rectangle> find_hole_in_plane(const Rectangle& area, std::span<Rectangle> rectangles) {
  CoverCounts counts(edges_in_y(area, rectangles));
  sort_by_begin(rectangles);
  std::vector<const Rectangle*> by_end;
  by_end.reserve(rectangles.size());
  for (const Rectangle& rectangle : rectangles) by_end.push_back(&rectangle);
  std::ranges::sort(by_end, {}, &Rectangle::end_x);
  std::size_t entered = 0, left = 0;
  for (std::int64_t x = area.begin_x; x < area.end_x;) {
    for (; entered < rectangles.size() && rectangles[entered].begin_x == x; ++entered) {
      counts.add(rectangles[entered].begin_y, rectangles[entered].end_y, 1);
    }
    for (; left < by_end.size() && by_end[left]->end_x == x; ++left) {
      counts.add(by_end[left]->begin_y, by_end[left]->end_y, -1);
    }
    std::int64_t next = area.end_x;
    if (entered < rectangles.size()) next = std::min(next, rectangles[entered].begin_x);
    if (left < by_end.size()) next = std::min(next, by_end[left]->end_x);
    if (!counts.all_covered()) {
      const auto [begin_y, end_y] = counts.first_uncovered();
      return Rectangle{x, next, begin_y, end_y};
    }
    x = next;
  }
  return std::nullopt;
}

}  // namespace tessera
