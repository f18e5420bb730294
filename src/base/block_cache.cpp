#include "tessera/base/internal/block_cache.h"

#include <sys/mman.h>

#include <algorithm>
#include <deque>
#include <mutex>
#include <new>

#include "tessera/base/internal/huge_pages.h"

namespace tessera {

namespace {

struct Cache {
  std::mutex mutex;
  std::deque<Block> blocks;  // oldest first
  std::size_t size_bytes = 0;
  std::size_t largest_bytes = 0;  // the largest block that was taken since all were released

  std::size_t limit_bytes() const { return std::min(kCachedBlockBytes, kCachedBlocks * largest_bytes); }
  void release_oldest() noexcept {
    unmap_huge_pages(blocks.front().data, blocks.front().size_bytes);
    size_bytes -= blocks.front().size_bytes;
    blocks.pop_front();
  }
};

// Never destroyed: blocks are also released while the program ends.
Cache& cache() {
  static auto* const the_cache = new Cache;
  return *the_cache;
}

// Limits the excess, so that small requests do not use up large blocks.
bool fits(std::size_t block_bytes, std::size_t wanted_bytes) {
  return block_bytes >= wanted_bytes && block_bytes - wanted_bytes <= wanted_bytes / 4;
}

}  // namespace

Block take_block(std::size_t size_bytes) {
  {
    Cache& kept = cache();
    const std::lock_guard lock(kept.mutex);
    kept.largest_bytes = std::max(kept.largest_bytes, size_bytes);
    // The newest block: the kernel is least likely to have taken its pages.
    const auto found = std::find_if(kept.blocks.rbegin(), kept.blocks.rend(),
                                    [&](const Block& block) { return fits(block.size_bytes, size_bytes); });
    if (found != kept.blocks.rend()) {
      const Block block = *found;
      kept.blocks.erase(std::next(found).base());
      kept.size_bytes -= block.size_bytes;
      return block;
    }
  }
  try {
    return {map_huge_pages(size_bytes), size_bytes};
  } catch (const std::bad_alloc&) {
    release_cached_blocks();
    return {map_huge_pages(size_bytes), size_bytes};
  }
}

void give_back(Block block) noexcept {
  if (block.size_bytes > kCachedBlockBytes || ::madvise(block.data, block.size_bytes, MADV_FREE) != 0) {
    unmap_huge_pages(block.data, block.size_bytes);
    return;
  }
  Cache& kept = cache();
  const std::lock_guard lock(kept.mutex);
  while (!kept.blocks.empty() && kept.size_bytes + block.size_bytes > kept.limit_bytes()) kept.release_oldest();
  try {
    if (block.size_bytes > kept.limit_bytes()) return unmap_huge_pages(block.data, block.size_bytes);
    kept.blocks.push_back(block);
    kept.size_bytes += block.size_bytes;
  } catch (...) {
    unmap_huge_pages(block.data, block.size_bytes);
  }
}

void release_cached_blocks() noexcept {
  Cache& kept = cache();
  const std::lock_guard lock(kept.mutex);
  while (!kept.blocks.empty()) kept.release_oldest();
  kept.largest_bytes = 0;
}

}  // namespace tessera
