#include "tessera/layout/mesh_layout.h"

#include <algorithm>
#include <utility>

#include "layout/mesh/split.h"
#include "tessera/base/checked.h"
#include "tessera/base/error.h"
#include "tessera/layout/placements.h"

namespace tessera {

MeshLayout::MeshLayout(std::vector<std::int64_t> size, std::vector<std::int64_t> mesh_shape, Placements placements)
    : size_(std::move(size)), mesh_shape_(std::move(mesh_shape)), placements_(normalized(placements, size_.size())) {
  mesh_size(mesh_shape_);
  if (placements_.size() != mesh_shape_.size()) {
    fail(ErrorCode::invalid_argument, "placements {} on a mesh of shape {}: expected one for each of its {} dimensions",
         to_string(placements_), shape_to_string(mesh_shape_), mesh_shape_.size());
  }
  if (mixes_partials(placements_)) {
    fail(ErrorCode::invalid_argument,
         "placements {} on a mesh of shape {}: partial tensors of several kinds, expected one kind, or sums and "
         "averages",
         to_string(placements_), shape_to_string(mesh_shape_));
  }
  for (const std::int64_t length : size_) {
    if (length < 0)
      fail(ErrorCode::invalid_argument, "tensor of shape {} on a mesh: expected no negative size",
           shape_to_string(size_));
  }
}

std::vector<Interval> MeshLayout::local_intervals(std::size_t dim, std::span<const std::int64_t> coordinate) const {
  std::vector<Interval> intervals;
  if (size_[dim] > 0) intervals.push_back({0, size_[dim]});
  for (std::size_t m = 0; m < placements_.size(); ++m) {
    const Placement& placement = placements_[m];
    if (!placement.is_shard(static_cast<std::int64_t>(dim))) continue;
    std::vector<Interval> sharded;
    append_shard(sharded, 0, intervals, placement, mesh_shape_[m], coordinate[m]);
    intervals = std::move(sharded);
  }
  return intervals;
}

LocalShape MeshLayout::local_shape(std::span<const std::int64_t> coordinate) const {
  LocalShape shape;
  shape.sizes.reserve(size_.size());
  shape.offsets.reserve(size_.size());
  for (std::size_t d = 0; d < size_.size(); ++d) {
    const std::vector<Interval> intervals = local_intervals(d, coordinate);
    const bool is_sharded = std::any_of(placements_.begin(), placements_.end(), [&](const Placement& placement) {
      return placement.is_shard(static_cast<std::int64_t>(d));
    });
    shape.sizes.push_back(count_of(intervals));
    shape.offsets.push_back(!intervals.empty() ? intervals.front().begin : is_sharded ? size_[d] : 0);
  }
  return shape;
}

std::vector<LocalBox> MeshLayout::local_boxes(std::span<const std::int64_t> coordinate) const {
  std::vector<LocalBox> boxes = {{Box({}, {}), {}}};
  for (std::size_t d = 0; d < size_.size(); ++d) {
    const std::vector<Interval> intervals = local_intervals(d, coordinate);
    std::vector<LocalBox> longer;
    for (const LocalBox& box : boxes) {
      std::int64_t local_offset = 0;
      for (const Interval& interval : intervals) {
        LocalBox& added = longer.emplace_back(box);
        added.box.offsets.push_back(interval.begin);
        added.box.sizes.push_back(interval.size());
        added.local_offsets.push_back(local_offset);
        local_offset += interval.size();
      }
    }
    boxes = std::move(longer);
  }
  return boxes;
}

LocalShape compute_local_shape_and_global_offset(std::vector<std::int64_t> size, std::vector<std::int64_t> mesh_shape,
                                                 std::span<const std::int64_t> coordinate, Placements placements) {
  return MeshLayout(std::move(size), std::move(mesh_shape), std::move(placements)).local_shape(coordinate);
}

namespace {

// Returns the number of parts that the shards make of each dimension.
std::vector<std::int64_t> parts_of(const MeshLayout& layout) {
  std::vector<std::int64_t> parts(layout.size().size(), 1);
  for (std::size_t m = 0; m < layout.placements().size(); ++m) {
    const Placement& placement = layout.placements()[m];
    if (placement.is_shard())
      parts[static_cast<std::size_t>(placement.dim())] *= layout.mesh_shape()[m] * placement.split_factor();
  }
  return parts;
}

}  // namespace

bool is_tensor_shardable(std::vector<std::int64_t> size, std::vector<std::int64_t> mesh_shape, Placements placements) {
  const MeshLayout layout(std::move(size), std::move(mesh_shape), std::move(placements));
  const std::vector<std::int64_t> parts = parts_of(layout);
  return std::equal(parts.begin(), parts.end(), layout.size().begin(),
                    [](std::int64_t count, std::int64_t length) { return count == 1 || length >= count; });
}

bool is_tensor_evenly_shardable(std::vector<std::int64_t> size, std::vector<std::int64_t> mesh_shape,
                                Placements placements) {
  const MeshLayout layout(std::move(size), std::move(mesh_shape), std::move(placements));
  const std::vector<std::int64_t> parts = parts_of(layout);
  return std::equal(parts.begin(), parts.end(), layout.size().begin(),
                    [](std::int64_t count, std::int64_t length) { return length % count == 0; });
}

std::int64_t mesh_size(std::span<const std::int64_t> mesh_shape) {
  std::int64_t size = 1;
  for (const std::int64_t length : mesh_shape) {
    if (length < 1) {
      fail(ErrorCode::invalid_argument, "mesh of shape {}: expected at least 1 in each dimension",
           shape_to_string(mesh_shape));
    }
    size = checked_multiply(size, length, "size of a mesh");
  }
  return size;
}

std::vector<std::int64_t> mesh_coordinate(std::span<const std::int64_t> mesh_shape, std::int64_t i) {
  std::vector<std::int64_t> coordinate(mesh_shape.size());
  for (std::size_t m = mesh_shape.size(); m-- > 0;) {
    coordinate[m] = i % mesh_shape[m];
    i /= mesh_shape[m];
  }
  return coordinate;
}

std::int64_t mesh_index(std::span<const std::int64_t> mesh_shape, std::span<const std::int64_t> coordinate) {
  std::int64_t index = 0;
  for (std::size_t m = 0; m < mesh_shape.size(); ++m) index = index * mesh_shape[m] + coordinate[m];
  return index;
}

}  // namespace tessera
