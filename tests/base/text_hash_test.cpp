#include "tessera/base/internal/text_hash.h"

#include <gtest/gtest.h>

#include <string>
#include <unordered_set>

namespace tessera {
namespace {

// libstdc++ hashes text by MurmurHash64A with a fixed seed. Each block of 8 bytes is mixed by a bijection. If two
// blocks in a row differ in the highest bit of their mixed form, the hash is the same, whatever precedes them.
constexpr std::uint64_t kMul = 0xc6a4a7935bd1e995;

std::uint64_t inverse_of(std::uint64_t odd) {
  std::uint64_t result = odd;
  for (int i = 0; i < 6; ++i) result *= 2 - odd * result;
  return result;
}
std::uint64_t shift_mix(std::uint64_t value) { return value ^ (value >> 47); }
std::string block(std::uint64_t mixed) {
  const std::uint64_t word = shift_mix(mixed * inverse_of(kMul)) * inverse_of(kMul);
  return {reinterpret_cast<const char*>(&word), sizeof word};
}

TEST(TextHashTest, KeysThatCollideForMurmurHashDoNotCollide) {
  constexpr std::uint64_t kHigh = std::uint64_t{1} << 63;
  std::unordered_set<std::size_t> found;
  for (std::uint64_t key = 0; key < 1024; ++key) {
    std::string text;
    for (std::uint64_t bit = 0; bit < 10; ++bit) {
      const std::uint64_t change = (key >> bit & 1) != 0 ? kHigh : 0;
      text += block((2 * bit + 1) ^ change) + block((2 * bit + 2) ^ change);
    }
    found.insert(TextHash()(text));
  }
  EXPECT_EQ(found.size(), 1024u);
}

TEST(TextHashTest, TextsOfEachLengthDiffer) {
  std::unordered_set<std::size_t> found;
  for (std::size_t size = 0; size < 100; ++size) found.insert(TextHash()(std::string(size, '\0')));
  EXPECT_EQ(found.size(), 100u);
  EXPECT_EQ(TextHash()("a text of some length"), TextHash()(std::string("a text of some length")));
}

// For `std::hash`, multiples of the number of buckets are all in one of them.
TEST(NumberHashTest, MultiplesOfAPrimeAreInDifferentBuckets) {
  constexpr std::uint64_t kPrime = 1'000'003;
  std::unordered_set<std::size_t> buckets;
  for (std::uint64_t i = 0; i < 1000; ++i) buckets.insert(NumberHash()(i * kPrime) % kPrime);
  EXPECT_GT(buckets.size(), 900u);
}

}  // namespace
}  // namespace tessera
