#pragma once
// Finds a chunk of a tensor by its offsets, as in PyTorch's storage_data.

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "tessera/layout/box.h"

namespace tessera::dcp {

// Keeps a sorted order only if the chunks are not already in strictly increasing order, which they usually are. If
// several chunks have equal offsets (empty shards), the first one represents them all. `chunks` must outlive the index.
class OffsetIndex {
 public:
  explicit OffsetIndex(const BoxList& chunks);

  // Returns the chunk at `offsets`, which must have the rank of the chunks. Tries `hint` first.
  std::optional<std::size_t> find(std::span<const std::int64_t> offsets, std::size_t hint = SIZE_MAX) const;

  bool has_equal_offsets() const { return has_equal_offsets_; }

  // Calls f(first, other) for every chunk that has the offsets of an earlier one.
  template <typename F>
  void for_each_equal(F&& f) const {
    if (!has_equal_offsets_) return;
    for (std::size_t i = 1, first = 0; i < order_.size(); ++i) {
      if (same(order_[first], order_[i])) {
        f(order_[first], order_[i]);
      } else {
        first = i;
      }
    }
  }

 private:
  std::size_t at(std::size_t position) const { return order_.empty() ? position : order_[position]; }
  bool same(std::size_t a, std::size_t b) const;

  const BoxList* chunks_;
  std::vector<std::size_t> order_;
  bool has_equal_offsets_ = false;
};

}  // namespace tessera::dcp
