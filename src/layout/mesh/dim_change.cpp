#include "layout/mesh/dim_change.h"

#include <algorithm>
#include <utility>

#include "layout/mesh/split.h"

namespace tessera {

namespace {

struct Placed {
  Interval interval;
  Segment::Place place;
};

// Returns the intervals of all parts in the order of the dimension.
std::vector<Placed> in_order(const DimParts& parts) {
  std::vector<Placed> placed;
  placed.reserve(parts.interval_count());
  for (std::size_t part = 0; part < parts.size(); ++part) {
    const std::span<const Interval> intervals = parts[part];
    for (std::size_t i = 0; i < intervals.size(); ++i) placed.push_back({intervals[i], {part, i}});
  }
  const auto begins_earlier = [](const Placed& a, const Placed& b) { return a.interval.begin < b.interval.begin; };
  if (!std::is_sorted(placed.begin(), placed.end(), begins_earlier))
    std::sort(placed.begin(), placed.end(), begins_earlier);
  return placed;
}

}  // namespace

DimParts::DimParts(const MeshLayout& layout, std::size_t dim) : begins_{0} {
  if (layout.size()[dim] > 0) intervals_.push_back({0, layout.size()[dim]});
  begins_.push_back(intervals_.size());
  for (std::size_t m = 0; m < layout.placements().size(); ++m) {
    const Placement& placement = layout.placements()[m];
    if (!placement.is_shard(static_cast<std::int64_t>(dim))) continue;
    const std::int64_t length = layout.mesh_shape()[m];
    std::vector<Interval> intervals;
    std::vector<std::size_t> begins = {0};
    intervals.reserve(intervals_.size() * static_cast<std::size_t>(length));
    begins.reserve(size() * static_cast<std::size_t>(length) + 1);
    for (std::size_t part = 0; part < size(); ++part) {
      for (std::int64_t i = 0; i < length; ++i) {
        append_shard(intervals, begins.back(), (*this)[part], placement, length, i);
        begins.push_back(intervals.size());
      }
    }
    mesh_dims_.push_back(m);
    lengths_.push_back(length);
    intervals_ = std::move(intervals);
    begins_ = std::move(begins);
  }
}

std::size_t DimParts::part_of(std::span<const std::int64_t> coordinate) const {
  std::int64_t part = 0;
  for (std::size_t k = 0; k < mesh_dims_.size(); ++k) part = part * lengths_[k] + coordinate[mesh_dims_[k]];
  return static_cast<std::size_t>(part);
}

std::vector<std::int64_t> DimParts::coordinates_of(std::size_t part) const {
  return mesh_coordinate(lengths_, static_cast<std::int64_t>(part));
}

DimChange::DimChange(const MeshLayout& from, const MeshLayout& to, std::size_t dim)
    : before(from, dim), after(to, dim) {
  const std::vector<Placed> sources = in_order(before), destinations = in_order(after);
  segments.reserve(sources.size() + destinations.size());
  for (std::size_t i = 0, k = 0; i < sources.size() && k < destinations.size();) {
    const Interval &source = sources[i].interval, &destination = destinations[k].interval;
    const std::int64_t end = std::min(source.end, destination.end);
    segments.push_back({{std::max(source.begin, destination.begin), end}, sources[i].place, destinations[k].place});
    if (source.end == end) ++i;
    if (destination.end == end) ++k;
  }
}

}  // namespace tessera
