#pragma once
// The memory of boxes of tensors, for collectives of ranks that share memory.

#include <ATen/core/Tensor.h>

#include "tessera/comm/internal/memory_pieces.h"
#include "tessera/layout/byte_ranges.h"

namespace tessera {

// Returns the memory of `box`, in row-major order, in a contiguous tensor that is the part `of` of a full one.
inline comm::MemoryPieces pieces_of_box(BoxView box, BoxView of, const at::Tensor& tensor) {
  comm::MemoryPieces pieces;
  auto* const data = static_cast<std::uint8_t*>(tensor.data_ptr());
  for (const ByteRange& range : byte_ranges(box, of, static_cast<std::int64_t>(tensor.element_size())))
    pieces.push_back({data + range.offset_bytes, static_cast<std::size_t>(range.length_bytes)});
  return pieces;
}

}  // namespace tessera
