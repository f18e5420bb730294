#pragma once
// Finds a tensor's chunk by its offsets, as PyTorch's storage_data does.

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "tessera/layout/box.h"

namespace tessera::dcp {

// Holds a sorted order only where the chunks are not already in strictly increasing order, which they mostly are.
// Several chunks may have equal offsets (empty shards); the first of them stands for all. `chunks` must outlive the
// index.
class OffsetIndex {
 public:
  explicit OffsetIndex(const BoxList& chunks);

  // The chunk at `offsets`, which must be of the chunks' rank. `hint` is tried first.
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
