#include "tessera/base/bytes.h"

#include <gtest/gtest.h>

#include "tessera/base/error.h"

namespace tessera {
namespace {

TEST(BytesTest, LittleEndianIsReadBackAsWritten) {
  Bytes bytes;
  append_little_endian<std::uint16_t>(bytes, 0x0102);
  append_little_endian<std::uint64_t>(bytes, 0x1122334455667788);
  EXPECT_EQ(bytes[0], 0x02);
  EXPECT_EQ(bytes[2], 0x88);
  EXPECT_EQ(load_little_endian<std::uint16_t>(bytes.data()), 0x0102);
  EXPECT_EQ(load_little_endian<std::uint64_t>(bytes.data() + 2), 0x1122334455667788);
}

TEST(BytesTest, SizesForPeopleRoundToTheUnit) {
  EXPECT_EQ(format_bytes(0), "0 B");
  EXPECT_EQ(format_bytes(1023), "1023 B");
  EXPECT_EQ(format_bytes(1536), "1.5 KiB");
  EXPECT_EQ(format_bytes((1u << 20) - 1), "1.0 MiB");
  EXPECT_EQ(format_bytes(UINT64_MAX), "16.0 EiB");
}

TEST(PrintableTest, ControlCharactersAndInvalidUtf8AreEscaped) {
  EXPECT_EQ(printable("gr\xc3\xbcn"), "gr\xc3\xbcn");
  EXPECT_EQ(printable(std::string_view("a\0b\n\x1b[2J", 8)), "a\\x00b\\x0a\\x1b[2J");
  EXPECT_EQ(printable("\xff\xc3"), "\\xff\\xc3");
  EXPECT_EQ(printable("\xed\xa0\x80"), "\\xed\\xa0\\x80") << "a lone surrogate";
  EXPECT_EQ(printable("\xc2\x9b"), "\\xc2\\x9b") << "a C1 control";
}

TEST(PrintableTest, LongTextIsCutBetweenCharacters) {
  EXPECT_EQ(printable("abcdef", 3), "abc...");
  EXPECT_EQ(printable("ab\xc3\xbc", 3), "ab...");
}

}  // namespace
}  // namespace tessera
