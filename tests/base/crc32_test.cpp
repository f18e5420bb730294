#include "tessera/base/crc32.h"

#include <gtest/gtest.h>

namespace tessera {
namespace {

TEST(Crc32Test, MatchesTheCheckValueOfTheStandard) { EXPECT_EQ(crc32(as_bytes("123456789")), 0xcbf43926u); }

TEST(Crc32Test, OfTwoPartsIsTheSameByContinuingAndByCombining) {
  const std::string text = "sharded training state, in two parts of unequal length";
  for (std::size_t split = 0; split <= text.size(); ++split) {
    const ByteView a = as_bytes(text).first(split), b = as_bytes(text).subspan(split);
    EXPECT_EQ(crc32(b, crc32(a)), crc32(as_bytes(text)));
    EXPECT_EQ(crc32_combine(crc32(a), crc32(b), b.size()), crc32(as_bytes(text)));
  }
}

TEST(Crc32Test, CombinesPartsLongerThanFourGigabytes) {
  // 2^33 zero bytes after "a": appending 2^32 twice gives the same CRC.
  const std::uint64_t length = std::uint64_t{1} << 32;
  std::uint32_t zeros = crc32(Bytes(1 << 20));
  for (std::uint64_t n = 1 << 20; n < length; n *= 2) zeros = crc32_combine(zeros, zeros, n);
  const std::uint32_t twice = crc32_combine(zeros, zeros, length);
  const std::uint32_t a = crc32(as_bytes("a"));
  EXPECT_EQ(crc32_combine(crc32_combine(a, zeros, length), zeros, length), crc32_combine(a, twice, 2 * length));
}

}  // namespace
}  // namespace tessera
