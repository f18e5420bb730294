#include "tessera/base/checked.h"

#include <gtest/gtest.h>

#include <array>
#include <limits>

#include "support/error_matchers.h"

namespace tessera {
namespace {

constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();

TEST(CheckedTest, ResultsThatFitAreReturned) {
  EXPECT_EQ(checked_add<std::int64_t>(kMax - 1, 1, "sum"), kMax);
  EXPECT_EQ(checked_multiply<std::int64_t>(1ll << 31, 1ll << 31, "product"), 1ll << 62);
  EXPECT_EQ(checked_cast<std::uint8_t>(255, "byte"), 255);
}

TEST(CheckedTest, OverflowNamesWhatWasComputed) {
  EXPECT_ERROR(checked_add<std::int64_t>(kMax, 1, "end of chunk"), ErrorCode::corrupt,
               "end of chunk overflows: 9223372036854775807 + 1, expected at most 9223372036854775807");
  EXPECT_ERROR(checked_multiply<std::int64_t>(kMax, 2, "bytes"), ErrorCode::corrupt,
               "bytes overflows: 9223372036854775807 * 2, expected at most 9223372036854775807");
  EXPECT_ERROR(checked_cast<std::uint8_t>(-1, "byte"), ErrorCode::corrupt, "byte out of range: -1, expected 0 to 255");
}

TEST(CheckedTest, AnOverflowBelowTheTypeStatesItsMinimum) {
  EXPECT_ERROR(checked_add<std::int64_t>(-kMax, -2, "offset"), ErrorCode::corrupt,
               "offset overflows: -9223372036854775807 + -2, expected at least -9223372036854775808");
  EXPECT_ERROR(checked_multiply<std::int64_t>(kMax, -2, "stride"), ErrorCode::corrupt,
               "stride overflows: 9223372036854775807 * -2, expected at least -9223372036854775808");
  EXPECT_ERROR(checked_multiply<std::int64_t>(-kMax, -2, "stride"), ErrorCode::corrupt,
               "expected at most 9223372036854775807");
  EXPECT_ERROR(checked_add<std::uint8_t>(255, 1, "byte"), ErrorCode::corrupt, "255 + 1, expected at most 255");
}

TEST(CheckedTest, NumelOfNoDimensionIsOne) {
  EXPECT_EQ(checked_numel({}, "shape"), 1);
  EXPECT_EQ(checked_numel(std::array<std::int64_t, 3>{2, 3, 4}, "shape"), 24);
  EXPECT_EQ(checked_numel(std::array<std::int64_t, 2>{5, 0}, "shape"), 0);
}

TEST(CheckedTest, NumelRefusesOverflowEvenWhereALaterSizeIsZero) {
  const std::array<std::int64_t, 3> sizes = {kMax, 2, 0};
  EXPECT_ERROR(checked_numel(sizes, "shape of 'x'"), ErrorCode::corrupt, "shape of 'x' overflows");
  const std::array<std::int64_t, 1> negative = {-1};
  EXPECT_ERROR(checked_numel(negative, "shape of 'x'"), ErrorCode::corrupt, "negative size: -1");
}

}  // namespace
}  // namespace tessera
