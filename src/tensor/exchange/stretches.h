#pragma once
// The memory ranges of boxes of tensors, for comm/peer_memory.h.

#include <ATen/core/Tensor.h>
#include <sys/uio.h>

#include <cstdint>
#include <vector>

#include "tessera/layout/byte_ranges.h"

namespace tessera {

// Bytes per read, which bounds the lists of runs.
constexpr std::int64_t kReadBytes = std::int64_t{8} << 20;

inline std::uint64_t address_of(const at::Tensor& tensor) {
  return reinterpret_cast<std::uintptr_t>(tensor.data_ptr());
}

// Returns the ranges of `box` in a row-major tensor at `address` that is the part `of` of a full one.
inline std::vector<iovec> stretches_of(BoxView box, BoxView of, std::int64_t element_bytes, std::uint64_t address) {
  std::vector<iovec> stretches;
  for (const ByteRange& range : byte_ranges(box, of, element_bytes)) {
    stretches.push_back({reinterpret_cast<void*>(address + static_cast<std::uint64_t>(range.offset_bytes)),
                         static_cast<std::size_t>(range.length_bytes)});
  }
  return stretches;
}

}  // namespace tessera
