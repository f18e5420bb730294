#include "tessera/base/internal/block_cache.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <vector>

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

// Without the limit this would need 64 GiB of address space.
TEST(BlockCacheTest, OnlySoMuchIsKept) {
  for (int round = 0; round < 4; ++round) {
    std::vector<Block> blocks;
    for (int i = 0; i < 20; ++i) blocks.push_back(take_block(kCachedBlockBytes / 16));
    for (const Block& block : blocks) give_back(block);
  }
  give_back(take_block(2 * kCachedBlockBytes));
  std::vector<Block> kept;
  for (int i = 0; i < 16; ++i) kept.push_back(take_block(kCachedBlockBytes / 16));
  for (const Block& block : kept) give_back(block);
}

}  // namespace
}  // namespace tessera
