#pragma once
// Memory for bytes that are about to be overwritten: not cleared, and kept from one use to the next.

#include <cstddef>
#include <cstdint>
#include <memory>

#include "tessera/base/bytes.h"

namespace tessera::checkpoint {

class Buffer {
 public:
  // `size` bytes of undefined contents, valid until the next call.
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
