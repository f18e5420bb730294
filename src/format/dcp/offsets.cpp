#include "format/dcp/offsets.h"

#include <algorithm>
#include <numeric>

namespace tessera::dcp {

namespace {

using Offsets = std::span<const std::int64_t>;

bool less(Offsets a, Offsets b) { return std::lexicographical_compare(a.begin(), a.end(), b.begin(), b.end()); }
bool equal_offsets(Offsets a, Offsets b) { return std::equal(a.begin(), a.end(), b.begin(), b.end()); }

}  // namespace

OffsetIndex::OffsetIndex(const BoxList& chunks) : chunks_(&chunks) {
  bool increasing = true;
  for (std::size_t i = 1; i < chunks.size() && increasing; ++i) {
    increasing = less(chunks[i - 1].offsets, chunks[i].offsets);
  }
  if (increasing) return;
  order_.resize(chunks.size());
  std::iota(order_.begin(), order_.end(), std::size_t{0});
  std::sort(order_.begin(), order_.end(), [&](std::size_t a, std::size_t b) {
    if (less(chunks[a].offsets, chunks[b].offsets)) return true;
    return a < b && same(a, b);
  });
  for (std::size_t i = 1; i < order_.size(); ++i) {
    has_equal_offsets_ = has_equal_offsets_ || same(order_[i - 1], order_[i]);
  }
}

std::optional<std::size_t> OffsetIndex::find(Offsets offsets, std::size_t hint) const {
  if (hint < chunks_->size() && !has_equal_offsets_ && equal_offsets((*chunks_)[hint].offsets, offsets)) return hint;
  std::size_t begin = 0, end = chunks_->size();
  while (begin < end) {
    const std::size_t middle = begin + (end - begin) / 2;
    if (less((*chunks_)[at(middle)].offsets, offsets)) {
      begin = middle + 1;
    } else {
      end = middle;
    }
  }
  if (begin == chunks_->size() || !equal_offsets((*chunks_)[at(begin)].offsets, offsets)) return std::nullopt;
  return at(begin);
}

bool OffsetIndex::same(std::size_t a, std::size_t b) const {
  return equal_offsets((*chunks_)[a].offsets, (*chunks_)[b].offsets);
}

}  // namespace tessera::dcp
