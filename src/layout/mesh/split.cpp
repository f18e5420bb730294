#include "layout/mesh/split.h"

#include <algorithm>

namespace tessera {

namespace {

// Returns the i-th of n chunks of `count` elements, as torch.chunk splits them.
Interval chunk(std::int64_t count, std::int64_t n, std::int64_t i) {
  const std::int64_t rows = count / n + (count % n != 0 ? 1 : 0);
  const std::int64_t begin = std::min(rows * i, count);
  return {begin, std::min(begin + rows, count)};
}

// Appends the elements at positions [part.begin, part.end) of the concatenated intervals `from` to `to`.
void append_part(std::vector<Interval>& to, std::size_t first, std::span<const Interval> from, Interval part) {
  std::int64_t position = 0;
  for (const Interval& interval : from) {
    const std::int64_t begin = std::max(part.begin - position, std::int64_t{0}) + interval.begin;
    const std::int64_t end = std::min(part.end - position, interval.size()) + interval.begin;
    position += interval.size();
    if (begin >= end) continue;
    if (to.size() > first && to.back().end == begin) {
      to.back().end = end;
    } else {
      to.push_back({begin, end});
    }
  }
}

}  // namespace

std::int64_t count_of(std::span<const Interval> intervals) {
  std::int64_t count = 0;
  for (const Interval& interval : intervals) count += interval.size();
  return count;
}

void append_shard(std::vector<Interval>& to, std::size_t first, std::span<const Interval> from, const Placement& shard,
                  std::int64_t length, std::int64_t i) {
  const std::int64_t count = count_of(from);
  for (std::int64_t k = 0; k < shard.split_factor(); ++k) {
    const Interval part = chunk(count, shard.split_factor(), k);
    const Interval piece = chunk(part.size(), length, i);
    append_part(to, first, from, {part.begin + piece.begin, part.begin + piece.end});
  }
}

}  // namespace tessera
