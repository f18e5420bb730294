#include "layout/cell.h"

#include <algorithm>
#include <limits>

namespace tessera {
namespace {

struct CellSplit {
  std::size_t dimension = 0;
  std::vector<std::int64_t> at;  // ascending, strictly inside the cell
};

std::vector<Interval> clipped_members(const BoxList& boxes, const Cell& cell, std::size_t d) {
  std::vector<Interval> intervals;
  intervals.reserve(cell.members.size());
  for (const std::size_t i : cell.members) intervals.push_back(clipped(boxes, i, cell, d));
  return intervals;
}

// Returns the coordinates that divide no interval, if each part between them has at most half of the intervals; else
// none.
std::vector<std::int64_t> clean_splits(std::vector<Interval>& intervals) {
  const auto begins_before = [](const Interval& a, const Interval& b) { return a.begin < b.begin; };
  if (!std::ranges::is_sorted(intervals, begins_before)) std::ranges::sort(intervals, begins_before);
  std::vector<std::int64_t> splits;
  std::size_t together = 0, most_together = 0;
  std::int64_t reached = intervals.front().begin;
  for (const Interval& interval : intervals) {
    if (interval.begin >= reached && together > 0) {
      splits.push_back(interval.begin);
      together = 0;
    }
    reached = std::max(reached, interval.end);
    most_together = std::max(most_together, ++together);
  }
  if (2 * most_together > intervals.size()) splits.clear();
  return splits;
}

std::int64_t median_edge(const std::vector<Interval>& intervals, std::int64_t begin, std::int64_t end) {
  std::vector<std::int64_t> edges;
  for (const Interval& interval : intervals) {
    if (interval.begin > begin) edges.push_back(interval.begin);
    if (interval.end < end) edges.push_back(interval.end);
  }
  const auto middle = edges.begin() + static_cast<std::ptrdiff_t>(edges.size() / 2);
  std::nth_element(edges.begin(), middle, edges.end());
  return *middle;
}

CellSplit choose_split(const BoxList& boxes, const Cell& cell, const std::vector<std::size_t>& uneven) {
  CellSplit best;
  std::ptrdiff_t fewest_divided = std::numeric_limits<std::ptrdiff_t>::max();
  for (const std::size_t d : uneven) {
    std::vector<Interval> intervals = clipped_members(boxes, cell, d);
    if (std::vector<std::int64_t> clean = clean_splits(intervals); !clean.empty()) return {d, std::move(clean)};
    const std::int64_t at = median_edge(intervals, cell.begin[d], cell.end[d]);
    const std::ptrdiff_t divided =
        std::ranges::count_if(intervals, [at](const Interval& x) { return x.begin < at && at < x.end; });
    if (divided < fewest_divided) {
      fewest_divided = divided;
      best = {d, {at}};
    }
  }
  return best;
}

}  // namespace

Interval clipped(const BoxList& boxes, std::size_t i, const Cell& cell, std::size_t d) {
  const BoxView box = boxes[i];
  return {std::max(box.offsets[d], cell.begin[d]), std::min(box.offsets[d] + box.sizes[d], cell.end[d])};
}

Cell bounds(const BoxList& boxes, const Cell& cell) {
  Cell tight{cell.end, cell.begin, cell.members};
  for (const std::size_t i : cell.members) {
    for (std::size_t d = 0; d < cell.begin.size(); ++d) {
      const Interval interval = clipped(boxes, i, cell, d);
      tight.begin[d] = std::min(tight.begin[d], interval.begin);
      tight.end[d] = std::max(tight.end[d], interval.end);
    }
  }
  return tight;
}

CellFacts look_at(const BoxList& boxes, const Cell& cell) {
  std::vector<bool> is_uneven(cell.begin.size(), false);
  CellFacts facts;
  for (const std::size_t i : cell.members) {
    bool spans = true;
    for (std::size_t d = 0; d < cell.begin.size(); ++d) {
      const Interval interval = clipped(boxes, i, cell, d);
      if (interval.begin == cell.begin[d] && interval.end == cell.end[d]) continue;
      spans = false;
      is_uneven[d] = true;
    }
    if (spans) facts.spanning = i;
  }
  for (std::size_t d = 0; d < is_uneven.size(); ++d) {
    if (is_uneven[d]) facts.uneven.push_back(d);
  }
  return facts;
}

std::vector<Cell> split(const BoxList& boxes, const Cell& cell, const std::vector<std::size_t>& uneven) {
  const auto [d, at] = choose_split(boxes, cell, uneven);
  std::vector<Cell> parts(at.size() + 1);
  for (std::size_t p = 0; p < parts.size(); ++p) {
    parts[p].begin = cell.begin;
    parts[p].end = cell.end;
    if (p > 0) parts[p].begin[d] = at[p - 1];
    if (p < at.size()) parts[p].end[d] = at[p];
  }
  for (const std::size_t i : cell.members) {
    const Interval interval = clipped(boxes, i, cell, d);
    auto p = static_cast<std::size_t>(std::ranges::upper_bound(at, interval.begin) - at.begin());
    for (; p < parts.size() && parts[p].begin[d] < interval.end; ++p) parts[p].members.push_back(i);
  }
  return parts;
}

}  // namespace tessera
