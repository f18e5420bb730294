#pragma once
/// \file
/// What must move from one set of boxes to another: the intersections, found through an index.
///
/// Law: if the sources partition a shape, then for every destination the transfers to it partition it.
/// Law: `BoxIndex(boxes).overlapping(b)` are all i with overlaps(boxes[i], b).

#include <cstddef>
#include <vector>

#include "tessera/layout/box.h"

namespace tessera {

/// Elements of `box` go from source `source` to destination `destination` (indices into the lists given).
struct Transfer {
  std::size_t source = 0;
  std::size_t destination = 0;
  Box box;
  bool operator==(const Transfer&) const = default;
};

/// All non-empty intersections, ordered by destination, then by source. Sources that overlap each give a transfer.
/// O(n log n + m log n + transfers) for n disjoint sources and m destinations (see `BoxIndex`).
std::vector<Transfer> plan_transfers(const BoxList& sources, const BoxList& destinations);

/// Finds the boxes of a list that meet a box, without looking at all of them: for many questions to one list. A tree of
/// bounding boxes: each node's boxes are halved by where they begin, in the dimension in which that differs most.
/// Immutable; any number of threads may ask at once.
class BoxIndex {
 public:
  /// `boxes` must outlive the index and not change. O(n log n).
  explicit BoxIndex(const BoxList& boxes);
  /// Indices of the boxes that share an element with `box`, ascending. About O(log n + found) where the boxes are
  /// disjoint.
  std::vector<std::size_t> overlapping(BoxView box) const;

 private:
  /// A node holds order_[first, last). Its left child is the next node, its right child is `right`, 0 for a leaf.
  struct Node {
    std::size_t first, last, right;
  };
  void build(std::size_t first, std::size_t last);
  bool reaches(std::size_t node, BoxView box) const;

  const BoxList* boxes_;
  std::vector<std::size_t> order_;    // the non-empty boxes
  std::vector<Node> nodes_;           // parents before children, the root first; none without boxes
  std::vector<std::int64_t> bounds_;  // per node: begins, then ends, of the box around its boxes
};

}  // namespace tessera
