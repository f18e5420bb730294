#pragma once
// Where boxes are in the memory of tensors, for comm/peer_memory.h.

#include <sys/uio.h>

#include <cstdint>
#include <vector>

#include "tessera/layout/byte_ranges.h"

namespace tessera {

// Of `box` in a row-major tensor that is the part `of` of a whole one and begins at `address`.
inline std::vector<iovec> stretches_of(BoxView box, BoxView of, std::int64_t element_bytes, std::uint64_t address) {
  std::vector<iovec> stretches;
  for (const ByteRange& range : byte_ranges(box, of, element_bytes)) {
    stretches.push_back({reinterpret_cast<void*>(address + static_cast<std::uint64_t>(range.offset_bytes)),
                         static_cast<std::size_t>(range.length_bytes)});
  }
  return stretches;
}

}  // namespace tessera
