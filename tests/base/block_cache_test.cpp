#include "tessera/base/internal/block_cache.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cstdint>
#include <cstring>
#include <new>
#include <vector>

#include "tessera/base/internal/process_memory.h"

namespace tessera {
namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;

TEST(BlockCacheTest, ABlockIsUsedAgainByWhoWantsAboutAsMuch) {
  const Block block = take_block(40 * kMiB);
  std::memset(block.data, 1, block.size_bytes);
  give_back(block);
  const Block larger = take_block(41 * kMiB), smaller = take_block(20 * kMiB), same = take_block(39 * kMiB);
  EXPECT_NE(larger.data, block.data);
  EXPECT_NE(smaller.data, block.data);
  EXPECT_EQ(same.data, block.data);
  EXPECT_EQ(same.size_bytes, 40 * kMiB);
  for (const Block& taken : {larger, smaller, same}) give_back(taken);
}

TEST(BlockCacheTest, BlocksAreAlignedHoldWhatIsWrittenAndAreNobodyElses) {
  std::vector<Block> blocks;
  for (std::uint8_t i = 0; i < 20; ++i) {
    blocks.push_back(take_block(3 * kMiB + i));
    ASSERT_EQ(reinterpret_cast<std::uintptr_t>(blocks.back().data) % (2 * kMiB), 0u);
    ASSERT_GE(blocks.back().size_bytes, 3 * kMiB + i);
    std::memset(blocks.back().data, i, 3 * kMiB + i);
  }
  for (std::uint8_t i = 0; i < 20; ++i) {
    const auto* bytes = static_cast<const std::uint8_t*>(blocks[i].data);
    EXPECT_TRUE(bytes[0] == i && bytes[3 * kMiB + i - 1] == i);
    give_back(blocks[i]);
  }
}

double mapped_mib() { return static_cast<double>(status_bytes("VmSize")) / kMiB; }

// Returns how many MiB stay mapped after `count` blocks were taken and given back.
double kept_mib(std::size_t block_mib, int count) {
  release_cached_blocks();
  const double before = mapped_mib();
  std::vector<Block> blocks;
  for (int i = 0; i < count; ++i) blocks.push_back(take_block(block_mib * kMiB));
  EXPECT_NEAR(mapped_mib() - before, static_cast<double>(block_mib) * count, 1);
  for (const Block& block : blocks) give_back(block);
  return mapped_mib() - before;
}

TEST(BlockCacheTest, OnlySoMuchIsKept) {
  EXPECT_NEAR(kept_mib(16, 20), kCachedBlocks * 16, 1);
  EXPECT_NEAR(kept_mib(512, 6), 1024, 1);
  EXPECT_NEAR(kept_mib(2048, 1), 0, 1);
}

TEST(BlockCacheTest, TheLargestBlockLimitsWhatIsKeptOfSmallerOnes) {
  release_cached_blocks();
  const Block large = take_block(16 * kMiB);
  const double before = mapped_mib();
  std::vector<Block> blocks;
  for (int i = 0; i < 100; ++i) blocks.push_back(take_block(kMiB));
  for (const Block& block : blocks) give_back(block);
  EXPECT_NEAR(mapped_mib() - before, kCachedBlocks * 16, 1);
  give_back(large);
  release_cached_blocks();
  EXPECT_NEAR(before - mapped_mib(), 16, 1);
}

// Blocks of 300 MiB are kept, so that one of 1 GiB has memory only once they are released.
TEST(BlockCacheTest, CachedBlocksAreReleasedIfThereIsNoMemory) {
  rlimit limit{};
  limit.rlim_cur = limit.rlim_max = status_bytes("VmData") + 1200 * kMiB;
  ASSERT_EQ(::setrlimit(RLIMIT_DATA, &limit), 0);
  const Block first = take_block(300 * kMiB), second = take_block(300 * kMiB);
  EXPECT_THROW(take_block(kCachedBlockBytes), std::bad_alloc);
  give_back(first);
  give_back(second);
  give_back(take_block(kCachedBlockBytes));
}

}  // namespace
}  // namespace tessera
