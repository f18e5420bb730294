#include "tessera/format/zip.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <filesystem>
#include <functional>
#include <map>

#include "support/error_matchers.h"
#include "support/paths.h"
#include "support/temporary_directory.h"
#include "tessera/base/crc32.h"

namespace tessera::zip {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;

const fs::path kGolden = fs::path(tessera::testing::source_dir()) / "tests" / "golden";

using Contents = std::vector<std::pair<std::string, Bytes>>;

Bytes to_bytes(std::string_view text) { return {as_bytes(text).begin(), as_bytes(text).end()}; }

Bytes write_archive(const Contents& contents) {
  Layout layout;
  for (const auto& [name, bytes] : contents) layout.add(name, bytes.size());
  Bytes out;
  std::vector<std::uint32_t> crcs;
  for (std::size_t i = 0; i < contents.size(); ++i) {
    EXPECT_EQ(out.size(), layout.header_offset_bytes(i));
    append(out, layout.header(i));
    EXPECT_EQ(out.size(), layout.data_offset_bytes(i));
    append(out, contents[i].second);
    EXPECT_EQ(out.size(), layout.descriptor_offset_bytes(i));
    crcs.push_back(crc32(contents[i].second));
    append(out, layout.descriptor(i, crcs.back()));
  }
  EXPECT_EQ(out.size(), layout.directory_offset_bytes());
  append(out, layout.directory(crcs));
  EXPECT_EQ(out.size(), layout.total_bytes());
  return out;
}

Directory read(const Bytes& bytes) {
  const MemorySource source(bytes, "mem.pt");
  return read_directory(source, 0, bytes.size());
}

Contents contents_of(const Bytes& bytes) {
  Contents contents;
  for (const Entry& entry : read(bytes).entries) {
    const auto begin = bytes.begin() + static_cast<std::ptrdiff_t>(entry.data_offset_bytes);
    contents.emplace_back(entry.name, Bytes(begin, begin + static_cast<std::ptrdiff_t>(entry.size_bytes)));
  }
  return contents;
}

// Reads everything; throws an error for any damage.
void read_and_check_data(const Bytes& bytes) {
  for (const Entry& entry : read(bytes).entries) {
    const ByteView data = ByteView(bytes).subspan(entry.data_offset_bytes, entry.size_bytes);
    if (crc32(data) != entry.crc32) fail(ErrorCode::corrupt, "CRC-32 of {}", entry.name);
  }
}

Contents small_archive() {
  return {{"archive/data.pkl", to_bytes("a pickle")}, {"archive/data/0", {}}, {"archive/version", to_bytes("3\n")}};
}

// Returns the first position of `what`.
std::size_t offset_of(const Bytes& bytes, std::string_view what, std::size_t from = 0) {
  const std::size_t found = as_text(bytes).find(what, from);
  EXPECT_NE(found, std::string::npos);
  return found;
}

Bytes replaced(Bytes bytes, std::string_view from, std::string_view to) {
  EXPECT_EQ(from.size(), to.size());
  for (std::size_t at = as_text(bytes).find(from); at != std::string::npos; at = as_text(bytes).find(from, at + 1)) {
    std::copy(to.begin(), to.end(), bytes.begin() + static_cast<std::ptrdiff_t>(at));
  }
  return bytes;
}

std::vector<fs::path> torch_archives() {
  std::vector<fs::path> paths = {kGolden / "checkpoints/1.13-sharded/ck/__0_0.distcp"};
  for (const fs::directory_entry& file : fs::directory_iterator(kGolden / "torch_archive")) {
    if (file.path().extension() == ".pt") paths.push_back(file.path());
  }
  std::sort(paths.begin(), paths.end());
  return paths;
}

TEST(ZipReadTest, EveryArchiveOfPyTorchIsReadWithRightChecksums) {
  ASSERT_GE(torch_archives().size(), 13u);
  for (const fs::path& path : torch_archives()) {
    SCOPED_TRACE(path);
    const Bytes bytes = read_file(path);
    EXPECT_NO_THROW(read_and_check_data(bytes));
    for (const Entry& entry : read(bytes).entries) EXPECT_EQ(entry.data_offset_bytes % 64, 0u) << entry.name;
  }
}

TEST(ZipReadTest, NoBitOfAnArchiveOfPyTorchCanChangeUnnoticed) {
  for (const char* name :
       {"checkpoints/1.13-sharded/ck/__0_0.distcp", "torch_archive/2.6-tensor.pt", "torch_archive/2.14-no_tensor.pt"}) {
    Bytes bytes = read_file(kGolden / name);
    for (std::size_t bit = 0; bit < bytes.size() * 8; ++bit) {
      const auto mask = static_cast<std::uint8_t>(1u << (bit % 8));
      bytes[bit / 8] ^= mask;
      EXPECT_THROW(read_and_check_data(bytes), Error) << name << ": bit " << bit % 8 << " of byte " << bit / 8;
      bytes[bit / 8] ^= mask;
    }
  }
}

TEST(ZipReadTest, NoBitOfAnArchiveWithEmptyAndSingleEntriesCanChangeUnnoticed) {
  for (const Contents& contents : {small_archive(), Contents{{"x", to_bytes("1")}}, Contents{{"x", {}}}}) {
    Bytes bytes = write_archive(contents);
    for (std::size_t bit = 0; bit < bytes.size() * 8; ++bit) {
      const auto mask = static_cast<std::uint8_t>(1u << (bit % 8));
      bytes[bit / 8] ^= mask;
      EXPECT_THROW(read_and_check_data(bytes), Error) << "bit " << bit % 8 << " of byte " << bit / 8;
      bytes[bit / 8] ^= mask;
    }
  }
}

TEST(ZipReadTest, AnArchiveCutOrContinuedAnywhereIsRefused) {
  const Bytes bytes = read_file(kGolden / "torch_archive/2.6-tensor.pt");
  for (std::size_t length = 0; length < bytes.size(); ++length) {
    EXPECT_THROW(read(Bytes(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(length))), Error) << length;
  }
  Bytes longer = bytes;
  longer.push_back(0);
  EXPECT_ERROR(read(longer), ErrorCode::corrupt, "mem.pt", "no end record");
  Bytes shifted = bytes;
  shifted.insert(shifted.begin(), 0);
  EXPECT_ERROR(read(shifted), ErrorCode::corrupt, "mem.pt");
}

TEST(ZipReadTest, AnArchiveMayBeASliceAndErrorsSayWhereInTheFile) {
  const Bytes archive = write_archive(small_archive());
  Bytes file = to_bytes(std::string(1000, 'x') + std::string(as_text(archive)) + std::string(500, 'y'));
  const MemorySource source(file, "big.distcp");
  const Directory directory = read_directory(source, 1000, archive.size());
  ASSERT_EQ(directory.entries.size(), 3u);
  EXPECT_EQ(directory.entries[0].data_offset_bytes, 1064u);
  EXPECT_EQ(directory.entries[0].header_offset_bytes, 1000u);

  file[1000] ^= 1;
  EXPECT_ERROR(read_directory(source, 1000, archive.size()), ErrorCode::corrupt, "big.distcp", "byte 1000",
               "signature of a local header");
  EXPECT_ERROR(read_directory(source, 1000, file.size()), ErrorCode::corrupt, "big.distcp", "at byte 1000",
               "ends past the file");
  EXPECT_ERROR(read_directory(source, UINT64_MAX, 2), ErrorCode::corrupt, "ends past the file");
}

TEST(ZipReadTest, EntriesAreFoundByName) {
  const Directory directory = read(write_archive(small_archive()));
  ASSERT_NE(directory.find("archive/version"), nullptr);
  EXPECT_EQ(directory.find("archive/version")->size_bytes, 2u);
  EXPECT_EQ(directory.find("archive"), nullptr);
  EXPECT_EQ(directory.find("zzz"), nullptr);
}

TEST(ZipReadTest, ZipsOfOtherToolsAreRead) {
  const Contents expected = contents_of(read_file(kGolden / "torch_archive/2.6-tensor.pt"));
  for (const char* name : {"python-stored.zip", "python-zip64.zip", "python-piped.zip", "python-piped-zip64.zip"}) {
    SCOPED_TRACE(name);
    const Bytes bytes = read_file(kGolden / "torch_archive" / name);
    EXPECT_NO_THROW(read_and_check_data(bytes));
    EXPECT_EQ(contents_of(bytes), expected);
  }
}

TEST(ZipReadTest, CompressedEntriesAreUnsupported) {
  EXPECT_ERROR(read(read_file(kGolden / "torch_archive/python-deflated.zip")), ErrorCode::unsupported, "mem.pt",
               "compressed (method 8)", "TorchScript");
}

TEST(ZipReadTest, EncryptedEntriesAreUnsupported) {
  Bytes bytes = read_file(kGolden / "torch_archive/python-stored.zip");
  bytes[6] |= 1;
  bytes[offset_of(bytes, "PK\x01\x02") + 8] |= 1;
  EXPECT_ERROR(read(bytes), ErrorCode::unsupported, "byte 0", "encrypted", "0x0001");
}

TEST(ZipReadTest, ASplitArchiveIsUnsupported) {
  Bytes bytes = read_file(kGolden / "torch_archive/python-stored.zip");
  const std::size_t end = bytes.size() - 22;
  bytes[end + 4] = bytes[end + 6] = 1;
  EXPECT_ERROR(read(bytes), ErrorCode::unsupported, "split over 2 disks, expected one file");
}

TEST(ZipReadTest, NamesThatLeaveTheArchiveAreRefused) {
  const std::vector<std::string> bad = {"/abs", "a/../b", "..", ".", "a//b", "a\\b", std::string("a\0b", 3)};
  for (const std::string& name : bad) {
    SCOPED_TRACE(name);
    EXPECT_ERROR(read(write_archive({{name, to_bytes("1")}})), ErrorCode::corrupt, "entry name",
                 "expected a relative path");
  }
  EXPECT_NO_THROW(read(write_archive({{"a..b/..c", to_bytes("1")}})));
}

TEST(ZipReadTest, TwoEntriesOfOneNameAreRefused) {
  const Bytes bytes = write_archive({{"a/1", to_bytes("1")}, {"a/2", to_bytes("1")}});
  EXPECT_ERROR(read(replaced(bytes, "a/2", "a/1")), ErrorCode::corrupt, "duplicate entry name 'a/1'", "byte 81");
}

TEST(ZipReadTest, NamesThatDifferInCaseOnlyAreRefused) {
  const Bytes bytes = write_archive({{"a/data", to_bytes("1")}, {"a/more", to_bytes("1")}});
  EXPECT_ERROR(read(replaced(bytes, "a/more", "a/DATA")), ErrorCode::corrupt, "duplicate entry name 'a/DATA'",
               "expected names that are unique without case");
  Layout layout;
  layout.add("a/data", 1);
  EXPECT_ERROR(layout.add("a/Data", 1), ErrorCode::invalid_argument, "duplicate entry name 'a/Data'",
               "expected names that are unique without case");
}

TEST(ZipReadTest, EntriesOfMixedCaseAreFoundByName) {
  const Directory directory = read(write_archive({{"a/B", to_bytes("1")}, {"a/a", {}}, {"A/c", {}}, {"a/b0", {}}}));
  for (const Entry& entry : directory.entries) EXPECT_EQ(directory.find(entry.name), &entry);
  EXPECT_EQ(directory.find("a/b"), nullptr);
}

// PyTorch takes the folder of the first record, whatever its offset.
TEST(ZipReadTest, ADirectoryInAnotherOrderIsRefused) {
  Bytes bytes = write_archive({{"a/x", to_bytes("1")}, {"b/x", to_bytes("1")}});
  const std::size_t first = offset_of(bytes, "PK\x01\x02"), second = offset_of(bytes, "PK\x01\x02", first + 1);
  const auto begin = bytes.begin() + static_cast<std::ptrdiff_t>(first);
  std::swap_ranges(begin, begin + static_cast<std::ptrdiff_t>(second - first),
                   bytes.begin() + static_cast<std::ptrdiff_t>(second));
  EXPECT_ERROR(read(bytes), ErrorCode::corrupt, "entry 'a/x' at offset 0 is listed after the entry at offset 81");
}

TEST(ZipReadTest, EntriesThatOverlapAreRefused) {
  const Bytes bytes = write_archive({{"a/1", to_bytes("same")}, {"a/2", to_bytes("same")}});
  // The second record is replaced by another of the first entry, as in a zip bomb.
  Bytes overlapping = bytes;
  const std::size_t first = offset_of(bytes, "PK\x01\x02"), second = offset_of(bytes, "PK\x01\x02", first + 1);
  std::copy_n(bytes.begin() + static_cast<std::ptrdiff_t>(first), second - first,
              overlapping.begin() + static_cast<std::ptrdiff_t>(second));
  EXPECT_ERROR(read(overlapping), ErrorCode::corrupt, "entry 'a/1'");
}

TEST(ZipReadTest, AbsurdNumbersEndBeforeAnythingIsAllocated) {
  const Bytes bytes = write_archive(small_archive());
  const std::size_t end64 = offset_of(bytes, "PK\x06\x06");
  for (const std::size_t field : {24u, 32u, 40u, 48u}) {  // entries here, entries, directory size, directory offset
    Bytes hostile = bytes;
    std::fill_n(hostile.begin() + static_cast<std::ptrdiff_t>(end64 + field), 8, 0xFF);
    if (field == 24) std::fill_n(hostile.begin() + static_cast<std::ptrdiff_t>(end64 + 32), 8, 0xFF);
    std::fill_n(hostile.end() - 14, 12, 0xFF);
    EXPECT_ERROR(read(hostile), ErrorCode::corrupt, "mem.pt", "byte");
  }
}

TEST(ZipReadTest, AnArchiveWithoutEntriesIsRefused) {
  EXPECT_ERROR(read(write_archive({})), ErrorCode::corrupt, "no entry");
  EXPECT_ERROR(read({}), ErrorCode::corrupt, "0 bytes, expected at least");
}

// Counts the bytes read.
class CountingSource final : public ByteSource {
 public:
  CountingSource(const Bytes& bytes, std::uint64_t& reads, std::uint64_t& read_bytes)
      : inner_(bytes, "counted"), reads_(reads), read_bytes_(read_bytes) {}
  void read_at(std::uint64_t offset_bytes, MutableByteView out) const override {
    ++reads_;
    read_bytes_ += out.size();
    inner_.read_at(offset_bytes, out);
  }
  std::uint64_t size_bytes() const override { return inner_.size_bytes(); }
  const std::string& name() const override { return inner_.name(); }

 private:
  MemorySource inner_;
  std::uint64_t &reads_, &read_bytes_;
};

TEST(ZipReadTest, ASmallArchiveIsReadOnceAndOfALargeOneOnlyItsRecords) {
  std::uint64_t reads = 0, read_bytes = 0;
  const Bytes small = write_archive(small_archive());
  read_directory(CountingSource(small, reads, read_bytes), 0, small.size());
  EXPECT_EQ(reads, 1u);
  EXPECT_EQ(read_bytes, small.size());

  Contents contents = small_archive();
  contents.insert(contents.begin() + 2, {"archive/data/1", Bytes(4 << 20, 7)});
  const Bytes large = write_archive(contents);
  reads = read_bytes = 0;
  const Directory directory = read_directory(CountingSource(large, reads, read_bytes), 0, large.size());
  EXPECT_EQ(directory.entries.size(), 4u);
  EXPECT_LE(reads, 3u);
  EXPECT_LT(read_bytes, 32u << 10);
}

TEST(ZipReadTest, ADirectoryLargerThanTheTailIsReadWhole) {
  Contents contents;
  for (int i = 0; i < 3000; ++i) contents.emplace_back("archive/data/" + std::to_string(i), to_bytes("x"));
  const Bytes bytes = write_archive(contents);
  EXPECT_EQ(contents_of(bytes), contents);
}

TEST(ZipReadTest, ALongCommentMustFit) {
  Bytes bytes = read_file(kGolden / "torch_archive/python-stored.zip");
  bytes[bytes.size() - 2] = 0x40;
  bytes[bytes.size() - 1] = 0x9C;
  bytes.insert(bytes.end(), 0x9C40, '#');
  EXPECT_NO_THROW(read(bytes));
  bytes.pop_back();
  const std::string size = std::to_string(bytes.size());
  EXPECT_ERROR(read(bytes), ErrorCode::corrupt, "no end record from byte 0 on",
               "expected one that reaches to the end of the archive at byte " + size);
}

TEST(ZipLayoutTest, WritesByteForByteWhatPyTorchWrites) {
  for (const fs::path& path : torch_archives()) {
    SCOPED_TRACE(path);
    const Bytes bytes = read_file(path);
    EXPECT_EQ(write_archive(contents_of(bytes)), bytes);
  }
}

TEST(ZipLayoutTest, SizesBeyond32BitsGoIntoZip64Fields) {
  constexpr std::uint64_t kLarge = 5ull << 30;
  Layout layout;
  layout.add("a/exact", 0xFFFFFFFE);
  layout.add("a/large", kLarge);
  layout.add("a/beyond", 10);
  layout.add("a/empty", 0);
  EXPECT_EQ(layout.descriptor(0, 1).size(), 16u);
  EXPECT_EQ(layout.descriptor(1, 1).size(), 24u);
  EXPECT_EQ(layout.descriptor(2, 1).size(), 24u) << "as PyTorch does where the offset is beyond";
  EXPECT_EQ(layout.descriptor(3, 0).size(), 0u);
  for (std::size_t i = 0; i < layout.size(); ++i) {
    EXPECT_EQ(layout.header(i).size(), layout.data_offset_bytes(i) - layout.header_offset_bytes(i));
    EXPECT_EQ(layout.data_offset_bytes(i) % 64, 0u);
    EXPECT_LT(layout.data_offset_bytes(i) - layout.header_offset_bytes(i), 192u);
  }
  EXPECT_EQ(layout.header_offset_bytes(2), layout.data_offset_bytes(1) + kLarge + 24);
}

TEST(ZipLayoutTest, AnArchiveOfManyGigabytesIsReadBack) {
  const testing::TemporaryDirectory directory;
  Layout layout;
  const std::vector<std::uint64_t> sizes = {100, 0xFFFFFFFF, 0xFFFFFFFE, 5ull << 30, 0, 77};
  for (std::size_t i = 0; i < sizes.size(); ++i) layout.add("archive/data/" + std::to_string(i), sizes[i]);
  std::vector<std::uint32_t> crcs = {1, 2, 3, 4, 0, 6};
  {
    File file = File::create_new(directory / "sparse.pt");  // holes where the data is
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      file.write_at(layout.header_offset_bytes(i), layout.header(i));
      file.write_at(layout.descriptor_offset_bytes(i), layout.descriptor(i, crcs[i]));
    }
    file.write_at(layout.directory_offset_bytes(), layout.directory(crcs));
    file.close();
  }
  const File file = File::open_read(directory / "sparse.pt");
  EXPECT_EQ(file.size_bytes(), layout.total_bytes());
  const Directory found = read_directory(file, 0, file.size_bytes());
  ASSERT_EQ(found.entries.size(), sizes.size());
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    EXPECT_EQ(found.entries[i].size_bytes, sizes[i]);
    EXPECT_EQ(found.entries[i].crc32, crcs[i]);
    EXPECT_EQ(found.entries[i].data_offset_bytes, layout.data_offset_bytes(i));
  }
}

TEST(ZipLayoutTest, MoreThan65535EntriesAreReadBack) {
  Contents contents;
  for (int i = 0; i < 70'000; ++i) contents.emplace_back("a/" + std::to_string(i), Bytes{});
  EXPECT_EQ(read(write_archive(contents)).entries.size(), contents.size());
}

TEST(ZipLayoutTest, WhatIsNoArchiveIsRefused) {
  Layout layout;
  layout.add("a/0", 1);
  EXPECT_ERROR(layout.add("a/0", 1), ErrorCode::invalid_argument, "duplicate entry name 'a/0'");
  EXPECT_ERROR(layout.add("", 1), ErrorCode::invalid_argument, "0 bytes");
  EXPECT_ERROR(layout.add(std::string(65'536, 'x'), 1), ErrorCode::invalid_argument, "65536 bytes");
  EXPECT_ERROR(layout.add("a/1", INT64_MAX), ErrorCode::invalid_argument, "too large");
  EXPECT_ERROR(layout.directory({}), ErrorCode::invalid_argument, "0 checksums, expected 1");
  EXPECT_NO_THROW(layout.add("a/2", INT64_MAX / 2));
  EXPECT_ERROR(layout.add("a/3", INT64_MAX / 2), ErrorCode::invalid_argument, "too large");
}

RC_GTEST_PROP(ZipLayoutTest, WhatIsWrittenIsReadBack, ()) {
  const auto data = *rc::gen::container<std::vector<Bytes>>(rc::gen::arbitrary<Bytes>());
  RC_PRE(!data.empty());
  Contents contents;
  for (std::size_t i = 0; i < data.size(); ++i) {
    const auto length = *rc::gen::inRange<std::size_t>(0, 100);
    contents.emplace_back("p/" + std::to_string(i) + std::string(length, 'n'), data[i]);
  }
  const Bytes bytes = write_archive(contents);
  RC_ASSERT(contents_of(bytes) == contents);
  read_and_check_data(bytes);
}

TEST(LooksLikeZipTest, TheLocalHeadersSignatureDecides) {
  EXPECT_TRUE(looks_like_zip(as_bytes("PK\x03\x04...")));
  EXPECT_FALSE(looks_like_zip(as_bytes("PK\x03")));
  EXPECT_FALSE(looks_like_zip(as_bytes("PK\x05\x06...")));
}

}  // namespace
}  // namespace tessera::zip
