#pragma once
// A cache of large memory blocks. The kernel clears memory when a process first touches it, which takes longer than
// filling it. A caller that frees about as much as it will allocate next avoids that cost.
//
// A cached block stays mapped and counts as memory of the process until the kernel takes its pages, which it may do
// when memory is short (MADV_FREE). Law: the cached blocks have at most kCachedBlocks times the size of the largest
// block, so that what a program frees for good is returned to the system. Any number of threads may call these
// functions.

#include <cstddef>

namespace tessera {

struct Block {
  void* data = nullptr;
  std::size_t size_bytes = 0;  // at least the requested size
};

// The limits on the total size of cached blocks, in bytes and in blocks of the largest size that was taken. Beyond them
// the oldest blocks are released.
constexpr std::size_t kCachedBlockBytes = std::size_t{1} << 30;
constexpr std::size_t kCachedBlocks = 4;

// Returns memory of undefined contents, aligned to 2 MiB, in huge pages if the system has them. If there is no memory,
// releases the cached blocks and tries again. Throws std::bad_alloc.
Block take_block(std::size_t size_bytes);
void give_back(Block block) noexcept;
// Returns all cached blocks to the system.
void release_cached_blocks() noexcept;

}  // namespace tessera
