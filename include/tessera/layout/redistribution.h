#pragma once
/// \file
/// Transfers from one set of boxes to another: their intersections, found through an index.
///
/// Law: if the sources partition a shape, the transfers to each destination partition that destination. Law:
/// `BoxIndex(boxes).overlapping(b)` is all i with overlaps(boxes[i], b).

#include <cstddef>
#include <vector>

#include "tessera/layout/box.h"

namespace tessera {

/// The elements of `box`, which move from source `source` to destination `destination` (indices into the given lists).
struct Transfer {
  std::size_t source = 0;
  std::size_t destination = 0;
  Box box;
  bool operator==(const Transfer&) const = default;
};

/// Returns all non-empty intersections, ordered by destination, then by source. Each of several overlapping sources
/// gives a transfer. Takes O(n log n + m log n + transfers) for n disjoint sources and m destinations (see `BoxIndex`).
std::vector<Transfer> plan_transfers(const BoxList& sources, const BoxList& destinations);

/// An index of a list of boxes that finds the ones overlapping a box, for many queries. It is a tree of bounding boxes.
/// Each node splits its boxes in half by their offsets, in the dimension in which the offsets vary most. Immutable; any
/// number of threads may query it at once.
class BoxIndex {
 public:
  /// `boxes` must outlive the index and not change. O(n log n).
  explicit BoxIndex(const BoxList& boxes);
  /// Returns the indices of the boxes that share an element with `box`, ascending. About O(log n + found) if the boxes
  /// are disjoint.
  std::vector<std::size_t> overlapping(BoxView box) const;

 private:
  /// A node covers order_[first, last). Its left child is the next node, its right child is `right`; 0 for a leaf.
  struct Node {
    std::size_t first, last, right;
  };
  void build(std::size_t first, std::size_t last);
  bool reaches(std::size_t node, BoxView box) const;

  const BoxList* boxes_;
  std::vector<std::size_t> order_;    // the non-empty boxes
  std::vector<Node> nodes_;           // parents before children, the root first; empty without boxes
  std::vector<std::int64_t> bounds_;  // per node: begins, then ends, of the bounding box
};

}  // namespace tessera
