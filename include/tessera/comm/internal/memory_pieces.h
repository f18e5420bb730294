#pragma once
// Memory of this process as a list of pieces, whose bytes are sent or received one after the other.

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tessera::comm {

// Without `data`, zeros that are sent.
struct MemoryPiece {
  std::uint8_t* data = nullptr;
  std::size_t size_bytes = 0;
  bool operator==(const MemoryPiece&) const = default;
};
using MemoryPieces = std::vector<MemoryPiece>;

}  // namespace tessera::comm
