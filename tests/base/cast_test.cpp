#include "tessera/base/cast.h"

#include <gtest/gtest.h>

#include <bit>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <sstream>

#include "support/error_matchers.h"
#include "support/paths.h"
#include "tessera/base/bytes.h"
#include "tessera/base/crc32.h"
#include "tessera/base/file.h"

namespace tessera {
namespace {

std::filesystem::path golden(const std::string& file) {
  return std::filesystem::path(tessera::testing::source_dir()) / "tests" / "golden" / "cast" / file;
}

// Returns the little-endian patterns first, first + step, ..., each of `size` bytes.
Bytes patterns(std::int64_t size, std::uint64_t count, std::uint64_t step) {
  Bytes bytes(count * static_cast<std::size_t>(size));
  for (std::uint64_t i = 0; i < count; ++i) {
    const std::uint64_t pattern = i * step;
    std::memcpy(bytes.data() + i * static_cast<std::size_t>(size), &pattern, static_cast<std::size_t>(size));
  }
  return bytes;
}

// A line of expected.txt; see generate.py.
struct Section {
  DType from, to;
  std::string inputs;
  Bytes source, expected;
};

std::vector<Section> sections(const std::string& inputs) {
  const Bytes expected = read_file(golden("expected.bin"));
  std::vector<Section> found;
  std::ifstream file(golden("expected.txt"));
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with('#')) continue;
    std::istringstream words(line);
    std::string from, to;
    Section section;
    std::ptrdiff_t offset = 0, length = 0;
    words >> from >> to >> section.inputs >> offset >> length;
    if (section.inputs != inputs) continue;
    section.from = dtype_from_name(from);
    section.to = dtype_from_name(to);
    section.expected.assign(expected.begin() + offset, expected.begin() + offset + length);
    if (inputs == "file") section.source = read_file(golden(from + ".inputs"));
    if (inputs == "all") section.source = patterns(1, 256, 1);
    if (inputs == "pages") section.source = patterns(2, 65536, 1);
    if (inputs == "every-1021st") section.source = patterns(4, (std::uint64_t{1} << 32) / 1021 + 1, 1021);
    found.push_back(std::move(section));
  }
  return found;
}

Bytes converted(const Section& section) {
  const std::int64_t count = static_cast<std::int64_t>(section.source.size()) / dtype_size(section.from);
  Bytes result(static_cast<std::size_t>(count * dtype_size(section.to)));
  cast(section.from, section.source.data(), section.to, result.data(), count);
  return result;
}

std::string hex(ByteView number) {
  std::string text;
  for (std::size_t i = number.size(); i-- > 0;) text += fmt::format("{:02x}", number[i]);
  return text;
}

void expect_same_numbers(const Section& section) {
  const Bytes found = converted(section);
  ASSERT_EQ(found.size(), section.expected.size());
  const auto from_bytes = static_cast<std::size_t>(dtype_size(section.from));
  const auto to_bytes = static_cast<std::size_t>(dtype_size(section.to));
  int shown = 0;
  for (std::size_t i = 0; i * to_bytes < found.size() && shown < 5; ++i) {
    const ByteView number = ByteView(found).subspan(i * to_bytes, to_bytes);
    const ByteView expected = ByteView(section.expected).subspan(i * to_bytes, to_bytes);
    if (std::ranges::equal(number, expected)) continue;
    ++shown;
    ADD_FAILURE() << dtype_name(section.from) << " "
                  << hex(ByteView(section.source).subspan(i * from_bytes, from_bytes)) << " became "
                  << dtype_name(section.to) << " " << hex(number) << ", in PyTorch " << hex(expected);
  }
}

TEST(CastTest, HardFloat64AndFloat32AsPyTorch) {
  const std::vector<Section> found = sections("file");
  EXPECT_EQ(found.size(), 14u);
  for (const Section& section : found) expect_same_numbers(section);
}

TEST(CastTest, AllFloat8AsPyTorch) {
  const std::vector<Section> found = sections("all");
  EXPECT_EQ(found.size(), 28u);
  for (const Section& section : found) expect_same_numbers(section);
}

TEST(CastTest, AllFloat16AndBFloat16AsPyTorch) {
  const std::vector<Section> found = sections("pages");
  EXPECT_EQ(found.size(), 14u);
  for (const Section& section : found) {
    const Bytes numbers = converted(section);
    const std::size_t page_bytes = numbers.size() / 256;
    for (std::size_t page = 0; page < 256; ++page) {
      EXPECT_EQ(crc32(ByteView(numbers).subspan(page * page_bytes, page_bytes)),
                load_little_endian<std::uint32_t>(section.expected.data() + 4 * page))
          << dtype_name(section.from) << " to " << dtype_name(section.to) << ", patterns from " << page * 256;
    }
  }
}

TEST(CastTest, EveryThousandthFloat32AsPyTorch) {
  const std::vector<Section> found = sections("every-1021st");
  EXPECT_EQ(found.size(), 7u);
  for (const Section& section : found) {
    EXPECT_EQ(crc32(converted(section)), load_little_endian<std::uint32_t>(section.expected.data()))
        << dtype_name(section.to);
  }
}

std::vector<DType> all_dtypes() {
  std::vector<DType> dtypes(kDTypeCount);
  for (std::size_t i = 0; i < kDTypeCount; ++i) dtypes[i] = static_cast<DType>(i);
  return dtypes;
}

TEST(CastTest, AnyDTypeToItselfIsACopy) {
  Bytes source(64);
  std::iota(source.begin(), source.end(), std::uint8_t{1});
  for (const DType dtype : all_dtypes()) {
    ASSERT_TRUE(can_cast(dtype, dtype)) << dtype_name(dtype);
    Bytes copy(64);
    cast(dtype, source.data(), dtype, copy.data(), 64 / dtype_size(dtype));
    EXPECT_EQ(copy, source) << dtype_name(dtype);
  }
}

TEST(CastTest, NothingIsConvertedBesideTheNamedTypes) {
  int pairs = 0;
  for (const DType from : all_dtypes()) {
    for (const DType to : all_dtypes()) pairs += can_cast(from, to) ? 1 : 0;
  }
  EXPECT_EQ(pairs, 8 * 8 + static_cast<int>(kDTypeCount) - 8);
  EXPECT_FALSE(can_cast(DType::float32, DType::int32));
  EXPECT_FALSE(can_cast(DType::complex64, DType::float32));
  EXPECT_FALSE(can_cast(DType::float8_e8m0fnu, DType::float32));
  std::uint8_t bytes[8] = {};
  EXPECT_ERROR(cast(DType::int64, bytes, DType::float32, bytes, 1), ErrorCode::unsupported, "int64 to float32");
}

// The same as torch.dtype.is_floating_point.
TEST(CastTest, FloatingPointTypesAreThoseOfPyTorch) {
  std::vector<std::string_view> names;
  for (const DType dtype : all_dtypes()) {
    if (is_floating_point(dtype)) names.push_back(dtype_name(dtype));
  }
  EXPECT_EQ(names, (std::vector<std::string_view>{"float32", "float64", "float16", "bfloat16", "float8_e4m3fn",
                                                  "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu",
                                                  "float4_e2m1fn_x2"}));
}

TEST(CastTest, UnalignedMemoryOfAnyLength) {
  for (const std::int64_t count : {0, 1, 7, 2047, 2048, 2049, 5000}) {
    Bytes source(static_cast<std::size_t>(count) * 4 + 1), found(static_cast<std::size_t>(count) * 2 + 2, 0xEE);
    for (std::int64_t i = 0; i < count; ++i) {
      const auto value = static_cast<float>(i);
      std::memcpy(source.data() + 1 + 4 * i, &value, 4);
    }
    cast(DType::float32, source.data() + 1, DType::bfloat16, found.data() + 1, count);
    Bytes back(static_cast<std::size_t>(count) * 4 + 1);
    cast(DType::bfloat16, found.data() + 1, DType::float32, back.data() + 1, count);
    EXPECT_EQ(found.front(), 0xEE);
    EXPECT_EQ(found.back(), 0xEE);
    for (std::int64_t i = 0; i < std::min<std::int64_t>(count, 257); ++i) {
      float value = 0;
      std::memcpy(&value, back.data() + 1 + 4 * i, 4);
      ASSERT_EQ(value, static_cast<float>(i)) << "of " << count;  // integers up to 256 are exact
    }
  }
}

}  // namespace
}  // namespace tessera
