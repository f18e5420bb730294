#pragma once
// A cache of large memory blocks. The kernel clears memory when a process first touches it, which takes longer than
// filling it. A caller that frees about as much as it will allocate next avoids that cost.
//
// A cached block stays mapped and counts as memory of the process until the kernel takes its pages, which it may do
// when memory is short (MADV_FREE). Any number of threads may call these functions.

#include <cstddef>

namespace tessera {

struct Block {
  void* data = nullptr;
  std::size_t size_bytes = 0;  // at least the requested size
};

// The limit on the total size of cached blocks. Beyond it the oldest blocks are released.
constexpr std::size_t kCachedBlockBytes = std::size_t{1} << 30;

// Returns memory of undefined contents, aligned to 2 MiB, in huge pages if the system has them. Throws std::bad_alloc.
Block take_block(std::size_t size_bytes);
void give_back(Block block) noexcept;

}  // namespace tessera
