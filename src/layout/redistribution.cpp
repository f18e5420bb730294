#include "tessera/layout/redistribution.h"

#include <algorithm>

namespace tessera {
namespace {

constexpr std::size_t kLeafBoxes = 8;

}  // namespace

BoxIndex::BoxIndex(const BoxList& boxes) : boxes_(&boxes) {
  if (boxes.size() <= kLeafBoxes) return;  // `overlapping` compares with each of them
  for (std::size_t i = 0; i < boxes.size(); ++i) {
    if (!is_empty(boxes[i])) order_.push_back(i);
  }
  if (!order_.empty()) build(0, order_.size());
}

// Appends the node of order_[first, last) and all nodes below it. The depth is logarithmic.
void BoxIndex::build(std::size_t first, std::size_t last) {
  const std::size_t rank = boxes_->rank();
  const std::size_t node = nodes_.size();
  nodes_.push_back({first, last, 0});
  const BoxView one = (*boxes_)[order_[first]];
  std::vector<std::int64_t> begin(one.offsets.begin(), one.offsets.end()), last_begin = begin, end = begin;
  for (std::size_t i = first; i < last; ++i) {
    const BoxView box = (*boxes_)[order_[i]];
    for (std::size_t d = 0; d < rank; ++d) {
      begin[d] = std::min(begin[d], box.offsets[d]);
      last_begin[d] = std::max(last_begin[d], box.offsets[d]);
      end[d] = std::max(end[d], box.offsets[d] + box.sizes[d]);
    }
  }
  bounds_.insert(bounds_.end(), begin.begin(), begin.end());
  bounds_.insert(bounds_.end(), end.begin(), end.end());
  if (last - first <= kLeafBoxes) return;
  std::size_t widest = rank;
  for (std::size_t d = 0; d < rank; ++d) {
    if (widest == rank || last_begin[d] - begin[d] > last_begin[widest] - begin[widest]) widest = d;
  }
  const std::size_t middle = first + (last - first) / 2;
  if (widest < rank) {
    const auto at = [this](std::size_t i) { return order_.begin() + static_cast<std::ptrdiff_t>(i); };
    const auto begins_before = [this, widest](std::size_t a, std::size_t b) {
      return (*boxes_)[a].offsets[widest] < (*boxes_)[b].offsets[widest];
    };
    std::nth_element(at(first), at(middle), at(last), begins_before);
  }
  build(first, middle);
  nodes_[node].right = nodes_.size();
  build(middle, last);
}

bool BoxIndex::reaches(std::size_t node, BoxView box) const {
  const std::size_t rank = box.rank();
  const std::int64_t* begin = bounds_.data() + node * 2 * rank;
  const std::int64_t* end = begin + rank;
  for (std::size_t d = 0; d < rank; ++d) {
    if (box.offsets[d] >= end[d] || box.offsets[d] + box.sizes[d] <= begin[d]) return false;
  }
  return true;
}

std::vector<std::size_t> BoxIndex::overlapping(BoxView box) const {
  std::vector<std::size_t> found;
  if (boxes_->size() <= kLeafBoxes) {
    for (std::size_t i = 0; i < boxes_->size(); ++i) {
      if (overlaps((*boxes_)[i], box)) found.push_back(i);
    }
    return found;
  }
  if (nodes_.empty() || is_empty(box)) return found;
  std::vector<std::size_t> stack = {0};
  while (!stack.empty()) {
    const std::size_t node = stack.back();
    stack.pop_back();
    if (!reaches(node, box)) continue;
    const auto [first, last, right] = nodes_[node];
    if (right != 0) {
      stack.push_back(right);
      stack.push_back(node + 1);
      continue;
    }
    for (std::size_t i = first; i < last; ++i) {
      if (overlaps((*boxes_)[order_[i]], box)) found.push_back(order_[i]);
    }
  }
  std::ranges::sort(found);
  return found;
}

std::vector<Transfer> plan_transfers(const BoxList& sources, const BoxList& destinations) {
  const BoxIndex index(sources);
  std::vector<Transfer> transfers;
  for (std::size_t destination = 0; destination < destinations.size(); ++destination) {
    for (const std::size_t source : index.overlapping(destinations[destination])) {
      if (std::optional<Box> shared = intersect(sources[source], destinations[destination])) {
        transfers.push_back({source, destination, std::move(*shared)});
      }
    }
  }
  return transfers;
}

}  // namespace tessera
