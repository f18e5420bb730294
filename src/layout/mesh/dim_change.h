#pragma once
// How two layouts split one dimension of a tensor.
//
// A part is what ranks hold of the dimension that have equal coordinates in the mesh dimensions that shard it: a list
// of intervals. Parts are numbered by these coordinates, row-major. A segment is a longest interval that one interval
// of a part before and one of a part after contain.
//
// Law: the parts of a layout partition the dimension, and so do the segments, in order.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "tessera/layout/interval.h"
#include "tessera/layout/mesh_layout.h"

namespace tessera {

class DimParts {
 public:
  DimParts(const MeshLayout& layout, std::size_t dim);

  // The mesh dimensions that shard the dimension, ascending.
  const std::vector<std::size_t>& mesh_dims() const { return mesh_dims_; }
  // The lengths of the mesh along these.
  const std::vector<std::int64_t>& mesh_lengths() const { return lengths_; }
  std::size_t size() const { return begins_.size() - 1; }
  std::span<const Interval> operator[](std::size_t part) const {
    return std::span(intervals_).subspan(begins_[part], begins_[part + 1] - begins_[part]);
  }
  std::size_t interval_count() const { return intervals_.size(); }
  // Returns the part of a rank.
  std::size_t part_of(std::span<const std::int64_t> coordinate) const;
  // Returns the coordinates of a part, one for each of mesh_dims().
  std::vector<std::int64_t> coordinates_of(std::size_t part) const;

 private:
  std::vector<std::size_t> mesh_dims_;
  std::vector<std::int64_t> lengths_;
  std::vector<Interval> intervals_;  // of all parts
  std::vector<std::size_t> begins_;  // where a part's intervals begin, and the end of the last
};

struct Segment {
  Interval interval;
  struct Place {
    std::size_t part = 0, interval = 0;  // the interval's index among those of its part
  };
  Place before, after;
};

struct DimChange {
  DimParts before, after;
  std::vector<Segment> segments;

  DimChange(const MeshLayout& from, const MeshLayout& to, std::size_t dim);
};

}  // namespace tessera
