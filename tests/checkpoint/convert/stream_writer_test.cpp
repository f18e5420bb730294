#include "checkpoint/convert/stream_writer.h"

#include <gtest/gtest.h>

#include "support/error_matchers.h"
#include "support/temporary_directory.h"
#include "tessera/base/crc32.h"

namespace tessera::checkpoint {
namespace {

using testing::TemporaryDirectory;

// The bytes of a pattern from `begin` on.
void fill(MutableByteView out, std::uint64_t seed, std::uint64_t begin) {
  std::uint8_t* const data = out.data();
  const std::uint64_t count = out.size();
  for (std::uint64_t i = 0; i < count; ++i) data[i] = static_cast<std::uint8_t>(((begin + i) * 131 + seed) >> 3);
}

Data pattern(std::uint64_t length, std::uint64_t seed, std::uint64_t granule = 1) {
  return {length, granule, [seed](std::uint64_t begin, MutableByteView out) { fill(out, seed, begin); }};
}

Bytes crc_text(const std::vector<std::uint32_t>& crcs, std::size_t i) {
  Bytes text;
  append_little_endian<std::uint32_t>(text, crcs[i]);
  return text;
}

// A unit of data segments, each followed by its CRC-32, with all CRCs at the end: the shape of a zip archive.
Unit archive_like(const std::vector<std::uint64_t>& lengths) {
  Unit unit;
  Bytes magic;
  append(magic, "HEAD");
  unit.segments.emplace_back(magic);
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    unit.segments.emplace_back(pattern(lengths[i], i, 12));
    unit.segments.emplace_back(
        Late{4, false, [i](const std::vector<std::uint32_t>& crcs) { return crc_text(crcs, i); }});
  }
  unit.segments.emplace_back(
      Late{4 * lengths.size(), true, [n = lengths.size()](const std::vector<std::uint32_t>& crcs) {
             Bytes all;
             for (std::size_t i = 0; i < n; ++i) append(all, crc_text(crcs, i));
             return all;
           }});
  return unit;
}

Bytes expected_archive(const std::vector<std::uint64_t>& lengths) {
  Bytes out, all;
  append(out, "HEAD");
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    Bytes data(lengths[i]);
    fill(data, i, 0);
    Bytes crc;
    append_little_endian<std::uint32_t>(crc, crc32(data));
    append(out, data);
    append(out, crc);
    append(all, crc);
  }
  append(out, all);
  return out;
}

class StreamWriterTest : public ::testing::TestWithParam<std::size_t> {};

TEST_P(StreamWriterTest, UnitsOfAllSizesComeOutAsPlanned) {
  const std::vector<std::vector<std::uint64_t>> units = {{},
                                                         {0},
                                                         {1, 2, 3},
                                                         {1 << 20},
                                                         {5 << 20, 7, 9u << 20},
                                                         {100, (4u << 20) + 1, 100},
                                                         {12345},
                                                         {3u << 20, 3u << 20, 3u << 20},
                                                         {4u << 20},
                                                         {(4u << 20) - 12, 1}};
  const TemporaryDirectory directory;
  Bytes expected;
  for (const auto& lengths : units) append(expected, expected_archive(lengths));
  Sidecar sidecar;
  {
    StreamWriter writer(file_system_storage(directory.path()), GetParam(), no_progress(), nullptr);
    for (const char* name : {"a", "b"}) {
      writer.begin_file(name, expected.size());
      for (const auto& lengths : units) writer.add(archive_like(lengths));
      writer.end_file();
    }
    writer.begin_file("empty", 0);
    writer.end_file();
    writer.add_small_file("small", as_bytes("text"));
    sidecar = writer.finish();
  }
  EXPECT_EQ(read_file(directory / "a"), expected);
  EXPECT_EQ(read_file(directory / "b"), expected);
  EXPECT_EQ(sidecar.files.size(), 4u);
  EXPECT_EQ(sidecar.files["a"], facts_of(expected));
  EXPECT_EQ(sidecar.files["empty"], facts_of({}));
  EXPECT_EQ(sidecar.files["small"], facts_of(as_bytes("text")));
}

INSTANTIATE_TEST_SUITE_P(Threads, StreamWriterTest, ::testing::Values(1, 2, 8));

TEST(StreamWriterFailureTest, AProducersFailureIsThrown) {
  const TemporaryDirectory directory;
  Unit unit;
  unit.segments.emplace_back(
      Data{100, 1, [](std::uint64_t, MutableByteView) { fail(ErrorCode::corrupt, "bad chunk"); }});
  StreamWriter writer(file_system_storage(directory.path()), 2, no_progress(), nullptr);
  writer.begin_file("a", 100);
  writer.add(std::move(unit));
  writer.end_file();
  EXPECT_ERROR(writer.finish(), ErrorCode::corrupt, "bad chunk");
}

TEST(StreamWriterFailureTest, AFullDiskIsKnownBeforeAnythingIsProduced) {
  const TemporaryDirectory directory;
  StreamWriter writer(file_system_storage(directory.path()), 2, no_progress(), nullptr);
  EXPECT_ERROR(writer.begin_file("a", std::uint64_t{1} << 60), ErrorCode::io, "reserve", "/a");
}

}  // namespace
}  // namespace tessera::checkpoint
