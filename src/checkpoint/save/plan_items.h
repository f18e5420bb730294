#pragma once
// A view of an encoded plan's items, so that a coordinator of many ranks does not copy them.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "checkpoint/byte_cursor.h"
#include "tessera/checkpoint/save_plan.h"

namespace tessera::checkpoint {

// Columns: the number of items; the entry of each; the stored bytes of each; then the boxes of the chunks, in order.
class EncodedItems {
 public:
  // Throws Error(corrupt) if the columns are truncated. Boxes are checked when they are read.
  explicit EncodedItems(ByteView bytes) {
    ByteCursor cursor(bytes, "save plan");
    count_ = cursor.number<std::uint64_t>();
    if (count_ > bytes.size()) {
      fail(ErrorCode::corrupt, "save plan: {0} items in {1} bytes, expected at most {1}", count_, bytes.size());
    }
    entries_ = cursor.take(count_ * sizeof(std::uint32_t)).data();
    stored_bytes_ = cursor.take(count_ * sizeof(std::uint64_t)).data();
    coordinates_ = cursor.rest();
  }
  std::size_t size() const { return count_; }
  std::uint32_t entry(std::size_t i) const { return load_little_endian<std::uint32_t>(entries_ + i * 4); }
  std::uint64_t stored_bytes(std::size_t i) const { return load_little_endian<std::uint64_t>(stored_bytes_ + i * 8); }
  // Copies coordinates [begin, begin + count) to `out`.
  void coordinates(std::size_t begin, std::size_t count, std::int64_t* out) const {
    if ((begin + count) * 8 > coordinates_.size()) {
      fail(ErrorCode::corrupt, "save plan: {} bytes of coordinates, expected at least {}", coordinates_.size(),
           (begin + count) * 8);
    }
    for (std::size_t i = 0; i < count; ++i) {
      out[i] = static_cast<std::int64_t>(load_little_endian<std::uint64_t>(coordinates_.data() + (begin + i) * 8));
    }
  }

 private:
  std::size_t count_ = 0;
  const std::uint8_t* entries_ = nullptr;
  const std::uint8_t* stored_bytes_ = nullptr;
  ByteView coordinates_;
};

std::vector<SavePlan::Entry> decode_entries(ByteView bytes);

}  // namespace tessera::checkpoint
