#pragma once
// Large blocks of memory that are used again. Memory that is new to a process is cleared by the kernel when it is first
// touched, which takes longer than filling it; who frees as much as it is about to want need not pay for that.
//
// A block that was given back is still mapped, but the kernel may take its pages whenever memory runs short
// (MADV_FREE): until it does they count as the process's own. Functions may be called by any number of threads.

#include <cstddef>

namespace tessera {

struct Block {
  void* data = nullptr;
  std::size_t size_bytes = 0;  // at least what was asked for
};

// Blocks that wait to be used again are at most so much together; the oldest go first.
constexpr std::size_t kCachedBlockBytes = std::size_t{1} << 30;

// Memory of undefined contents, aligned to 2 MiB, in huge pages where the system has them. Throws std::bad_alloc.
Block take_block(std::size_t size_bytes);
void give_back(Block block) noexcept;

}  // namespace tessera
