// Checksums of the sidecar are compared by every reader: no flipped bit reaches a result.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <random>

#include "support/chaos.h"
#include "support/error_matchers.h"
#include "support/golden.h"
#include "support/temporary_directory.h"
#include "support/torch_file.h"
#include "tessera/base/crc32.h"
#include "tessera/base/function_ref.h"
#include "tessera/checkpoint/convert.h"
#include "tessera/checkpoint/diff.h"
#include "tessera/checkpoint/sidecar.h"
#include "tessera/checkpoint/tensor_reader.h"
#include "tessera/checkpoint/verify.h"
#include "tessera/format/safetensors.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;
using testing::Golden;
using testing::TemporaryDirectory;

using Files = std::map<std::string, Bytes>;

Files files_in(const fs::path& directory) {
  Files files;
  for (const fs::directory_entry& entry : fs::directory_iterator(directory)) {
    files[entry.path().filename().string()] = read_file(entry.path());
  }
  return files;
}

std::shared_ptr<Storage> storage_of(const Files& files) {
  const std::shared_ptr<Storage> storage = memory_storage();
  for (const auto& [name, bytes] : files) write_new_file(*storage, name, bytes);
  return storage;
}

// Rewrites the sidecar as version 1, which has no blocks.
void to_version_1(Files& files) {
  Bytes& bytes = files.at(std::string(kSidecarFileName));
  std::string text = R"({"version": 1, "files": {)";
  for (const auto& [name, facts] : parse_sidecar(bytes, "sidecar").files) {
    if (text.back() == '}') text += ", ";
    text += fmt::format(R"("{}": {{"bytes": {}, "crc32": "{:08x}"}})", name, facts.size_bytes, facts.crc32);
  }
  text += "}}";
  bytes.assign(text.begin(), text.end());
}

class FlippedBitTest : public ::testing::TestWithParam<std::tuple<SourceKind, int>> {
 protected:
  void SetUp() override {
    const auto [kind, version] = GetParam();
    ConvertOptions options;
    options.to = kind;
    convert(Checkpoint::open(testing::read_golden("2.14-optim").checkpoint), directory_ / "made", options);
    files_ = files_in(directory_ / "made");
    if (version == 1) to_version_1(files_);
  }
  // Calls `use` for each byte of each file but the sidecar, with a bit of it flipped: of DCP, which is larger, for
  // every eighth byte unless the campaign runs longer.
  void for_each_flip(FunctionRef<void(const std::string& file, std::size_t at)> use) {
    std::mt19937 random(1);
    const bool is_large = std::get<0>(GetParam()) == SourceKind::dcp;
    const auto step = static_cast<std::size_t>(is_large ? std::max(8 / testing::chaos_factor(), 1) : 1) *
                      testing::stride_if_sanitized(7);
    for (auto& [name, bytes] : files_) {
      if (name == kSidecarFileName) continue;
      for (std::size_t at = 0; at < bytes.size(); at += step) {
        const auto bit = static_cast<std::uint8_t>(1u << (random() % 8));
        bytes[at] ^= bit;
        use(name, at);
        bytes[at] ^= bit;
      }
    }
  }
  const TemporaryDirectory directory_;
  Files files_;
};
INSTANTIATE_TEST_SUITE_P(Formats, FlippedBitTest,
                         ::testing::Combine(::testing::Values(SourceKind::dcp, SourceKind::safetensors),
                                            ::testing::Values(1, 2)));

TEST_P(FlippedBitTest, IsFoundByDiff) {
  const auto good = Checkpoint::open(storage_of(files_));
  EXPECT_TRUE(diff(good, Checkpoint::open(storage_of(files_))).same());
  std::size_t flips = 0, missed = 0;
  for_each_flip([&](const std::string& file, std::size_t at) {
    ++flips;
    try {
      const DiffReport report = diff(good, Checkpoint::open(storage_of(files_)));
      if (missed++ > 10) return;  // enough is reported
      ADD_FAILURE() << file << " at byte " << at << ": "
                    << (report.same() ? "no difference" : to_string(report.differences.at(0)));
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::corrupt) << error.what();
    }
  });
  EXPECT_EQ(missed, 0u);
  fmt::print("{} flips, {} missed\n", flips, missed);
}

TEST_P(FlippedBitTest, IsNotConverted) {
  std::size_t flips = 0;
  const auto stride = static_cast<std::size_t>(std::max(41 / testing::chaos_factor(), 1));
  const fs::path damaged = directory_ / "damaged", out = directory_ / "out";
  for_each_flip([&](const std::string& file, std::size_t at) {
    if (flips++ % stride != 0) return;  // each is a directory of synced files
    fs::create_directory(damaged);
    for (const auto& [name, bytes] : files_) write_new_file(damaged / name, bytes);
    ConvertOptions options;
    options.to = SourceKind::safetensors;
    EXPECT_ERROR(convert(Checkpoint::open(damaged), out, options), ErrorCode::corrupt, file.substr(0, 3));
    EXPECT_FALSE(fs::exists(out)) << file << " at byte " << at;
    EXPECT_FALSE(verify(damaged).good());
    OpenOptions unchecked;
    unchecked.check_checksums = false;
    if (file.ends_with(".safetensors") && at > files_.at(file).size() - 1000) {
      EXPECT_NO_THROW(convert(Checkpoint::open(damaged, unchecked), out, options));
    }
    fs::remove_all(damaged);
    fs::remove_all(out);
  });
  EXPECT_GT(flips, 1000u);
}

// A tensor of several blocks in a safetensors file.
class BlocksTest : public ::testing::Test {
 protected:
  static constexpr std::int64_t kRows = 300, kColumns = 1000;  // of 4 bytes: 1.2 MB, 10 blocks
  void SetUp() override {
    Bytes elements(static_cast<std::size_t>(kRows * kColumns * 4));
    for (std::size_t i = 0; i < elements.size(); ++i) elements[i] = static_cast<std::uint8_t>(i * 7 + i / 251);
    const std::vector<safetensors::Tensor> tensors = {
        {"t", DType::float32, {kRows, kColumns}, 0, static_cast<std::uint64_t>(elements.size())}};
    Bytes& bytes = files_["model.safetensors"] = safetensors::write_header(tensors, {});
    data_at_ = bytes.size();
    append(bytes, elements);
    Sidecar sidecar;
    sidecar.files["model.safetensors"] = facts_of(bytes);
    files_[std::string(kSidecarFileName)] = write_sidecar(sidecar);
  }
  void flip(std::size_t at) { files_.at("model.safetensors")[at] ^= 1; }
  Files files_;
  std::size_t data_at_ = 0;
};

TEST_F(BlocksTest, APartThatTouchesADamagedBlockIsRefused) {
  flip(data_at_ + 3 * Sidecar::kBlockBytes);
  const auto checkpoint = Checkpoint::open(storage_of(files_));
  const TensorReader reader(checkpoint, 0);
  for (std::int64_t row = 0; row < kRows; ++row) {
    const Box box({row, 0}, {1, kColumns});
    Bytes out(static_cast<std::size_t>(kColumns * 4));
    const std::uint64_t begin = data_at_ + static_cast<std::uint64_t>(row * kColumns * 4), end = begin + out.size();
    const std::uint64_t block = (data_at_ / Sidecar::kBlockBytes + 3) * Sidecar::kBlockBytes;
    if (begin < block + Sidecar::kBlockBytes && end > block) {
      EXPECT_ERROR(reader.read(box, out), ErrorCode::corrupt, "model.safetensors",
                   fmt::format("at byte {}: {} bytes have CRC-32", block, Sidecar::kBlockBytes), "as in the sidecar");
    } else {
      EXPECT_NO_THROW(reader.read(box, out)) << row;
    }
  }
}

TEST_F(BlocksTest, ScatteredReadsAreCountedAndComparedLater) {
  const auto checkpoint = Checkpoint::open(storage_of(files_));
  EXPECT_EQ(checkpoint->largest_block_bytes(), Sidecar::kBlockBytes);
  const TensorReader reader(checkpoint, 0);
  Bytes column(static_cast<std::size_t>(kRows * 200 * 4));
  reader.read(Box({0, 0}, {kRows, 200}), column);
  EXPECT_GT(checkpoint->bytes_not_compared(), static_cast<std::uint64_t>(kRows * kColumns * 4 - 300'000));
  checkpoint->compare_rest();
  EXPECT_EQ(checkpoint->bytes_not_compared(), 0u);

  flip(data_at_ + 500'000);
  const auto damaged = Checkpoint::open(storage_of(files_));
  const TensorReader other(damaged, 0);
  other.read(Box({0, 0}, {kRows, 200}), column);
  EXPECT_ERROR(damaged->compare_rest(), ErrorCode::corrupt, "as in the sidecar");
}

TEST_F(BlocksTest, TheLargestBlockOfVersion1IsAFile) {
  to_version_1(files_);
  EXPECT_EQ(Checkpoint::open(storage_of(files_))->largest_block_bytes(), files_.at("model.safetensors").size());
}

TEST_F(BlocksTest, TheSidecarIsSmall) {
  EXPECT_LT(files_.at(std::string(kSidecarFileName)).size(), 400u);
  // A terabyte in a million chunks, 64 files.
  std::uint64_t bytes = 0;
  const Sidecar::FileFacts facts = facts_of_blocks(std::uint64_t{1} << 34, std::vector<std::uint32_t>(1u << 17));
  Sidecar one;
  one.files["f"] = facts;
  bytes = write_sidecar(one).size();
  EXPECT_LT(bytes * 1000, facts.size_bytes);
}

TEST_F(BlocksTest, AnotherSizeIsRefused) {
  files_.at("model.safetensors").push_back(0);
  EXPECT_ERROR(Checkpoint::open(storage_of(files_)), ErrorCode::corrupt, "the file has 1200", "as in the sidecar");
}

TEST(SidecarOfAFileTest, IsComparedWithTheFileBesideItWhateverItsName) {
  const TemporaryDirectory directory;
  ConvertOptions options;
  options.to = SourceKind::safetensors;
  convert(Checkpoint::open(testing::read_golden("2.14-optim").checkpoint), directory / "a.safetensors", options);
  // Renamed together, they belong together.
  fs::copy(directory / "a.safetensors", directory / "b.safetensors");
  fs::copy(directory / "a.safetensors.tessera.json", directory / "b.safetensors.tessera.json");
  EXPECT_TRUE(verify(directory / "b.safetensors").good());
  EXPECT_TRUE(
      diff(Checkpoint::open(directory / "a.safetensors"), Checkpoint::open(directory / "b.safetensors")).same());
  // Of another file it vouches for nothing.
  Bytes bytes = read_file(directory / "b.safetensors");
  bytes.back() ^= 1;
  fs::remove(directory / "b.safetensors");
  write_new_file(directory / "b.safetensors", bytes);
  // The kernel's clock of files may not have moved since "a" was written.
  fs::last_write_time(directory / "b.safetensors",
                      fs::last_write_time(directory / "a.safetensors") + std::chrono::seconds(1));
  const VerifyReport report = verify(directory / "b.safetensors");
  ASSERT_EQ(report.problems.size(), 1u);
  EXPECT_FALSE(report.sidecar_agrees);
  EXPECT_THAT(report.problems[0].what, ::testing::HasSubstr("overwritten since"));
  EXPECT_THAT(report.problems[0].what, ::testing::HasSubstr("b.safetensors at byte"));
}

}  // namespace
}  // namespace tessera::checkpoint
