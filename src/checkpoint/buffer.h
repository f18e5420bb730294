#pragma once
// A reusable buffer of uninitialized memory.

#include <cstddef>
#include <cstdint>
#include <memory>

#include "tessera/base/bytes.h"

namespace tessera::checkpoint {

class Buffer {
 public:
  // Returns `size` bytes of undefined contents, valid until the next call.
  MutableByteView get(std::size_t size) {
    if (size > capacity_) {
      data_ = std::make_unique_for_overwrite<std::uint8_t[]>(size);
      capacity_ = size;
    }
    return {data_.get(), size};
  }

 private:
  std::unique_ptr<std::uint8_t[]> data_;
  std::size_t capacity_ = 0;
};

}  // namespace tessera::checkpoint
