#include "tessera/checkpoint/verify.h"
#include "tessera/format/dcp_metadata.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>

#include "support/chaos.h"
#include "support/error_matchers.h"
#include "support/golden.h"
#include "support/temporary_directory.h"
#include "tessera/base/function_ref.h"
#include "tessera/checkpoint/convert.h"
#include "tessera/checkpoint/sidecar.h"
#include "tessera/format/safetensors.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;
using testing::overwrite_file;
using testing::TemporaryDirectory;

// Returns whether one problem has all of the words.
bool has_problem(const VerifyReport& report, const std::vector<std::string>& words) {
  return std::any_of(report.problems.begin(), report.problems.end(), [&](const Problem& problem) {
    return std::all_of(words.begin(), words.end(),
                       [&](const std::string& word) { return problem.what.find(word) != std::string::npos; });
  });
}

std::string all_problems(const VerifyReport& report) {
  std::string text;
  for (const Problem& problem : report.problems) text += problem.what + "\n";
  return text;
}

#define EXPECT_PROBLEM(report, ...) EXPECT_TRUE(has_problem(report, {__VA_ARGS__})) << all_problems(report)

class VerifyTest : public ::testing::Test {
 protected:
  VerifyTest() { fs::copy(testing::read_golden("2.14-optim").checkpoint, checkpoint_, fs::copy_options::recursive); }

  // Rewrites .metadata with a change.
  void change_metadata(FunctionRef<void(dcp::Metadata&)> change) const {
    const fs::path path = checkpoint_ / ".metadata";
    dcp::Metadata metadata = dcp::read(File::open_read(path));
    change(metadata);
    overwrite_file(path, dcp::write(metadata));
  }

  static dcp::MetadataEntry& entry(dcp::Metadata& metadata, const std::string& name) {
    for (dcp::MetadataEntry& candidate : metadata.entries) {
      if (candidate.name == name) return candidate;
    }
    throw std::runtime_error("no entry " + name);
  }

  const TemporaryDirectory directory_;
  const fs::path checkpoint_ = directory_ / "ck";
};

TEST_F(VerifyTest, AFlippedBitAnywhereInADataFileIsFound) {
  for (const char* name : {"__0_0.distcp", "__0_1.distcp"}) {
    const Bytes good = read_file(checkpoint_ / name);
    Bytes bytes = good;
    for (std::size_t i = 0; i < good.size(); i += 53 * testing::stride_if_sanitized(5)) {
      bytes[i] ^= static_cast<std::uint8_t>(1u << (i % 8));
      overwrite_file(checkpoint_ / name, bytes);
      EXPECT_FALSE(verify(checkpoint_).good()) << name << ", byte " << i << ", bit " << i % 8;
      bytes[i] = good[i];
    }
    overwrite_file(checkpoint_ / name, good);
  }
  EXPECT_TRUE(verify(checkpoint_).good());
}

TEST_F(VerifyTest, AFlippedBitOfATensorNamesFileOffsetAndTensor) {
  const auto source = Checkpoint::open(checkpoint_);
  const Extent extent = source->locate(*source->find_tensor("model.2.weight"), 0);
  const std::string file = source->files()[extent.file].name;
  Bytes bytes = read_file(checkpoint_ / file);
  bytes[extent.offset_bytes + 17] ^= 1;
  overwrite_file(checkpoint_ / file, bytes);
  const VerifyReport report = verify(checkpoint_);
  ASSERT_EQ(report.problem_count, 1u) << all_problems(report);
  EXPECT_EQ(report.problems[0].file, file);
  EXPECT_EQ(report.problems[0].offset_bytes, extent.offset_bytes);
  EXPECT_EQ(report.problems[0].name, "model.2.weight");
}

// Ranks that save without collectives each save replicated tensors and list them in their own metadata.
TEST_F(VerifyTest, TheOtherRanksCopiesAreAccountedForAndChecked) {
  const fs::path path = checkpoint_ / ".metadata";
  dcp::Metadata metadata = dcp::read(File::open_read(path));
  for (std::string& file : metadata.files) {
    fs::copy(checkpoint_ / file, checkpoint_ / ("copy_" + file));
    file.insert(0, "copy_");
  }
  overwrite_file(checkpoint_ / "__1.metadata", dcp::write(metadata));
  fs::rename(path, checkpoint_ / "__0.metadata");
  EXPECT_EQ(verify(checkpoint_).problem_count, 0u) << all_problems(verify(checkpoint_));

  const fs::path copy = checkpoint_ / metadata.files[0];
  Bytes bytes = read_file(copy);
  bytes[bytes.size() / 2] ^= 1;
  overwrite_file(copy, bytes);
  EXPECT_PROBLEM(verify(checkpoint_), copy.filename().string());
}

TEST(VerifyShardsTest, AShardThatTheNamesOfTheOthersAnnounceIsMissing) {
  const TemporaryDirectory directory;
  const Bytes file = read_file(fs::path(testing::source_dir()) / "tests/golden/safetensors/0.8.0-shapes.safetensors");
  for (const char* name : {"a-00002-of-00003.safetensors", "b-00000-of-00001.safetensors"}) {
    SCOPED_TRACE(name);
    fs::create_directory(directory / name);
    write_new_file(directory / name / name, file);
  }
  const VerifyReport report = verify(directory / "a-00002-of-00003.safetensors");
  EXPECT_EQ(report.problem_count, 2u);
  EXPECT_PROBLEM(report, "a-00001-of-00003.safetensors: the file is missing");
  EXPECT_PROBLEM(report, "a-00003-of-00003.safetensors: the file is missing");
  const VerifyReport counted_from_0 = verify(directory / "b-00000-of-00001.safetensors");
  EXPECT_TRUE(counted_from_0.good()) << all_problems(counted_from_0);
}

// Several checks read the directory of an archive.
TEST_F(VerifyTest, OneDamageIsOneProblem) {
  const auto checkpoint = Checkpoint::open(checkpoint_);
  const StoredRange stored = checkpoint->tensors()[0].stored[0];
  const fs::path file = checkpoint_ / checkpoint->files()[stored.file].name;
  Bytes bytes = read_file(file);
  const std::string padding = "ZZZZ";
  const auto found = std::search(bytes.begin() + static_cast<std::ptrdiff_t>(stored.offset_bytes), bytes.end(),
                                 padding.begin(), padding.end());
  ASSERT_NE(found, bytes.end());
  *found ^= 1;
  overwrite_file(file, bytes);
  EXPECT_EQ(verify(checkpoint_).problem_count, 1u) << all_problems(verify(checkpoint_));
}

TEST_F(VerifyTest, WithASidecarAFlippedBitAnywhereIsFound) {
  ConvertOptions options;
  options.to = SourceKind::dcp;
  convert(Checkpoint::open(checkpoint_), directory_ / "ours", options);
  for (const fs::directory_entry& file : fs::directory_iterator(directory_ / "ours")) {
    const Bytes good = read_file(file.path());
    Bytes bytes = good;
    for (std::size_t i = 0; i < good.size(); i += 97 * testing::stride_if_sanitized(5)) {
      bytes[i] ^= static_cast<std::uint8_t>(1u << (i % 8));
      overwrite_file(file.path(), bytes);
      EXPECT_FALSE(verify(directory_ / "ours").good()) << file.path() << ", byte " << i << ", bit " << i % 8;
      bytes[i] = good[i];
    }
    overwrite_file(file.path(), good);
  }
  EXPECT_TRUE(verify(directory_ / "ours").good());
}

TEST_F(VerifyTest, TruncationAtAnyLengthIsFound) {
  for (const char* name : {"__0_0.distcp", ".metadata"}) {
    const Bytes good = read_file(checkpoint_ / name);
    for (std::size_t length = 0; length < good.size(); length += 61 * testing::stride_if_sanitized(5)) {
      overwrite_file(checkpoint_ / name, ByteView(good).first(length));
      EXPECT_FALSE(verify(checkpoint_).good()) << name << " truncated to " << length;
    }
    overwrite_file(checkpoint_ / name, good);
  }
}

TEST_F(VerifyTest, DamagedMetadataIsFoundOrHarmlessAndNeverACrash) {
  const Bytes good = read_file(checkpoint_ / ".metadata");
  Bytes bytes = good;
  for (std::size_t i = 0; i < good.size(); i += 7 * testing::stride_if_sanitized(5)) {
    bytes[i] ^= static_cast<std::uint8_t>(1u << (i % 8));
    overwrite_file(checkpoint_ / ".metadata", bytes);
    try {
      verify(checkpoint_);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::unsupported) << error.what();
    }
    bytes[i] = good[i];
  }
}

TEST_F(VerifyTest, AMissingFileIsNamed) {
  fs::remove(checkpoint_ / "__0_1.distcp");
  const VerifyReport report = verify(checkpoint_);
  EXPECT_PROBLEM(report, "__0_1.distcp", "missing");
}

TEST_F(VerifyTest, WhatAnInterruptedSaveLeftIsNamedAndNoProblem) {
  for (const char* name : {"__7_0.distcp", "__0_0.3.distcp", ".metadata.tmp", ".tessera.json.tmp"}) {
    write_new_file(checkpoint_ / name, as_bytes("x"));
  }
  const VerifyReport report = verify(checkpoint_);
  EXPECT_TRUE(report.good());
  EXPECT_THAT(report.left_over,
              ::testing::ElementsAre(".metadata.tmp", ".tessera.json.tmp", "__0_0.3.distcp", "__7_0.distcp"));
}

TEST_F(VerifyTest, ADataFileThatNoSaveMadeIsAProblem) {
  write_new_file(checkpoint_ / "copy of __0_0.distcp", as_bytes("x"));
  const VerifyReport report = verify(checkpoint_);
  EXPECT_PROBLEM(report, "copy of __0_0.distcp", "the metadata does not refer to it");
  EXPECT_EQ(report.problem_count, 1u);
}

TEST_F(VerifyTest, BytesBehindTheLastItemAreAccountedFor) {
  Bytes bytes = read_file(checkpoint_ / "__0_0.distcp");
  const std::size_t end = bytes.size();
  append(bytes, "trailing");
  overwrite_file(checkpoint_ / "__0_0.distcp", bytes);
  EXPECT_PROBLEM(verify(checkpoint_), "__0_0.distcp", fmt::format("at byte {}", end), "8 bytes that nothing refers to");
}

TEST_F(VerifyTest, OverlappingChunksAreNamed) {
  change_metadata([](dcp::Metadata& metadata) {
    dcp::MetadataEntry& weight = entry(metadata, "model.0.weight");
    weight.chunks.push_back(Box({3, 2}, {2, 2}));
    weight.items.push_back(weight.items[0]);
  });
  EXPECT_PROBLEM(verify(checkpoint_), "model.0.weight", "overlap", "[3, 5)x[2, 4)");
}

TEST_F(VerifyTest, AHoleIsNamed) {
  change_metadata([](dcp::Metadata& metadata) { entry(metadata, "model.0.weight").shape = {15, 9}; });
  EXPECT_PROBLEM(verify(checkpoint_), "model.0.weight", "no chunk holds [14, 15)x[0, 9)");
}

TEST_F(VerifyTest, AChunkOutOfBoundsIsNamed) {
  change_metadata([](dcp::Metadata& metadata) { entry(metadata, "model.0.weight").shape = {13, 9}; });
  EXPECT_PROBLEM(verify(checkpoint_), "model.0.weight", "[0, 14)x[0, 9)", "outside of the shape [13, 9]");
}

TEST_F(VerifyTest, AnArchiveThatDisagreesWithTheMetadataIsNamed) {
  change_metadata([](dcp::Metadata& metadata) { entry(metadata, "model.0.weight").properties.dtype = DType::int32; });
  EXPECT_PROBLEM(verify(checkpoint_), "model.0.weight", "has dtype float32, expected int32 as in the metadata");
}

TEST_F(VerifyTest, AnArchiveOfAnotherShapeIsNamed) {
  change_metadata([](dcp::Metadata& metadata) {
    dcp::MetadataEntry& weight = entry(metadata, "model.0.weight");
    weight.shape = {9, 14};
    weight.chunks = BoxList({Box({0, 0}, {9, 14})});
  });
  EXPECT_PROBLEM(verify(checkpoint_), "model.0.weight", "has shape [14, 9], expected [9, 14] as in the metadata");
}

TEST_F(VerifyTest, AnItemBehindTheEndOfItsFileIsNamed) {
  change_metadata([](dcp::Metadata& metadata) { entry(metadata, "model.2.bias").items[0].offset_bytes = 1'000'000; });
  EXPECT_PROBLEM(verify(checkpoint_), "at byte 1000000", "model.2.bias", "expected them within the file's");
}

TEST_F(VerifyTest, AnItemThatIsNotSaidWhereIsNamed) {
  change_metadata(
      [](dcp::Metadata& metadata) { entry(metadata, "model.2.bias").items[0].file = dcp::StoredItem::kNoFile; });
  EXPECT_PROBLEM(verify(checkpoint_), "model.2.bias", "does not specify where");
}

TEST_F(VerifyTest, DataFilesOutsideOfTheDirectoryAreRefused) {
  for (const char* name : {"../__0_0.distcp", "/etc/passwd", "a/../../x", ""}) {
    const TemporaryDirectory copy;
    fs::copy(checkpoint_, copy / "ck", fs::copy_options::recursive);
    const fs::path path = copy.path() / "ck" / ".metadata";
    dcp::Metadata metadata = dcp::read(File::open_read(path));
    metadata.files[0] = name;
    overwrite_file(path, dcp::write(metadata));
    EXPECT_PROBLEM(verify(copy / "ck"), "leaves the checkpoint's directory");
    EXPECT_ERROR(Checkpoint::open(copy / "ck"), ErrorCode::corrupt, "leaves the checkpoint's directory");
  }
}

TEST_F(VerifyTest, AFileThatTheSidecarDoesNotListIsNamed) {
  ConvertOptions options;
  options.to = SourceKind::safetensors;
  const fs::path ours = directory_ / "ours";
  convert(Checkpoint::open(checkpoint_), ours, options);
  // What serving needs is no damage.
  write_new_file(ours / "config.json", as_bytes("{}"));
  write_new_file(ours / "tokenizer.json", as_bytes("{}"));
  const VerifyReport report = verify(ours);
  EXPECT_TRUE(report.good());
  EXPECT_TRUE(report.sidecar_agrees);
  EXPECT_EQ(report.other_files, (std::vector<std::string>{"config.json", "tokenizer.json"}));
  // Tensors that are taken for part of the checkpoint are.
  const safetensors::Tensor tensor = {"stray", DType::float32, {}, 0, 4};
  Bytes bytes = safetensors::write_header({tensor}, {});
  bytes.resize(bytes.size() + 4);
  write_new_file(ours / "stray.safetensors", bytes);
  EXPECT_PROBLEM(verify(ours), "stray.safetensors", "the sidecar does not list it");
}

TEST_F(VerifyTest, ALostShardOfAModelIsNamedWithItsTensors) {
  ConvertOptions options;
  options.to = SourceKind::safetensors;
  options.max_shard_bytes = 1000;
  const fs::path ours = directory_ / "ours";
  convert(Checkpoint::open(checkpoint_), ours, options);
  const std::string lost = Checkpoint::open(ours)->files()[1].name;
  std::string name;
  const auto complete = Checkpoint::open(ours);
  for (const TensorInfo& tensor : complete->tensors()) {
    if (complete->files()[tensor.stored.at(0).file].name == lost) name = tensor.name;
  }
  fs::remove(ours / lost);
  const VerifyReport report = verify(ours);
  ASSERT_EQ(report.problem_count, 1u) << all_problems(report);
  EXPECT_PROBLEM(report, lost, "missing", name);
  EXPECT_EQ(report.problems[0].file, lost);
  EXPECT_FALSE(report.sidecar_agrees);
  EXPECT_ERROR(Checkpoint::open(ours), ErrorCode::corrupt, lost, "missing", "'");
}

// A checkpoint with a sidecar, in which a bit of the first tensor's first element is flipped.
struct Damaged {
  std::string file, tensor;
  std::uint64_t offset_bytes = 0;
  Bytes contents;  // of the file
};

Damaged damage_an_element(const fs::path& from, const fs::path& to) {
  ConvertOptions options;
  options.to = SourceKind::dcp;
  convert(Checkpoint::open(from), to, options);
  const auto opened = Checkpoint::open(to);
  const Extent extent = opened->locate(0, 0);
  Damaged damaged{opened->files()[extent.file].name, opened->tensors()[0].name, extent.offset_bytes, {}};
  damaged.contents = read_file(to / damaged.file);
  damaged.contents[extent.offset_bytes] ^= 1;
  overwrite_file(to / damaged.file, damaged.contents);
  // The kernel's clock of files may not have moved since they were written.
  fs::last_write_time(to / damaged.file, fs::last_write_time(to / damaged.file) + std::chrono::seconds(1));
  return damaged;
}

TEST_F(VerifyTest, ADamagedBlockIsNamedWithItsTensorsAndTheEntryToo) {
  const Damaged damaged = damage_an_element(checkpoint_, directory_ / "ours");
  const VerifyReport report = verify(directory_ / "ours");
  EXPECT_PROBLEM(report, damaged.file, "at byte 0", "as in the sidecar", "overwritten since");
  EXPECT_PROBLEM(report, damaged.file, fmt::format("at byte {}", damaged.offset_bytes), damaged.tensor);
}

TEST_F(VerifyTest, EachDamagedBlockIsNamedWithWhatItHoldsUpToTheLimit) {
  ConvertOptions to_dcp;
  to_dcp.to = SourceKind::dcp;
  convert(Checkpoint::open(checkpoint_), directory_ / "ours", to_dcp);
  const auto opened = Checkpoint::open(directory_ / "ours");
  std::string json;
  std::uint64_t blocks = 0;
  for (const SourceFile& file : opened->files()) {
    const std::uint64_t count = (*file.size_bytes + 1023) / 1024;
    blocks += count;
    json += fmt::format(R"({}"{}": {{"bytes": {}, "crc32": "00000000", "blocks": "{}"}})", json.empty() ? "" : ", ",
                        file.name, *file.size_bytes, std::string(8 * count, '0'));
  }
  overwrite_file(sidecar_path(directory_ / "ours"),
                 as_bytes(fmt::format(R"({{"version": 2, "block_bytes": 1024, "files": {{{}}}}})", json)));
  for (const std::size_t limit : {std::size_t{3}, std::size_t{1'000'000}}) {
    VerifyOptions options;
    options.max_problems = limit;
    const VerifyReport report = verify(directory_ / "ours", options);
    EXPECT_EQ(report.problem_count, blocks);
    EXPECT_EQ(report.problems.size(), std::min<std::size_t>(limit, blocks));
    for (const Problem& problem : report.problems) {
      std::vector<std::string> names;
      const auto take = [&](const StoredRange& stored, const std::string& name) {
        const bool is_in = opened->files()[stored.file].name == problem.file &&
                           stored.offset_bytes < *problem.offset_bytes + 1024 &&
                           stored.offset_bytes + stored.length_bytes > *problem.offset_bytes;
        if (is_in) names.push_back(name);
      };
      for (const TensorInfo& tensor : opened->tensors()) take(tensor.stored.at(0), tensor.name);
      for (const ObjectInfo& object : opened->objects()) take(object.stored, object.name);
      EXPECT_EQ(problem.name, names.size() == 1 ? names[0] : "") << problem.what;
      if (names.size() > 1) {
        EXPECT_THAT(problem.what, ::testing::HasSubstr(fmt::format("they hold '{}', '{}'", names[0], names[1])));
      }
    }
  }
}

TEST_F(VerifyTest, AnIndexStandsForItsDirectory) {
  ConvertOptions options;
  options.to = SourceKind::safetensors;
  options.selection.select = {"model.*"};
  options.max_shard_bytes = 1;
  const fs::path directory = directory_ / "st", index = directory / "model.safetensors.index.json";
  convert(Checkpoint::open(checkpoint_), directory, options);
  EXPECT_TRUE(verify(index).good());
  EXPECT_TRUE(verify(index).sidecar_agrees);
  const std::string file = Checkpoint::open(index)->files().at(1).name;
  Bytes bytes = read_file(directory / file);
  bytes.back() ^= 1;
  overwrite_file(directory / file, bytes);
  for (const fs::path& path : {directory, index}) EXPECT_PROBLEM(verify(path), file, "as in the sidecar");
}

// The sidecar agrees with a file whose entries have wrong checksums: another program wrote it so.
TEST_F(VerifyTest, EntriesAreComparedAlsoWhereTheSidecarAgrees) {
  const Damaged damaged = damage_an_element(checkpoint_, directory_ / "ours");
  Sidecar sidecar = *read_sidecar(directory_ / "ours");
  sidecar.files.at(damaged.file) = facts_of(damaged.contents);
  overwrite_file(sidecar_path(directory_ / "ours"), write_sidecar(sidecar));
  const VerifyReport report = verify(directory_ / "ours");
  EXPECT_TRUE(report.sidecar_agrees);
  EXPECT_PROBLEM(report, damaged.file, damaged.tensor, "have CRC-32");
}

TEST_F(VerifyTest, WhatIsNoCheckpointHasNoAnswer) {
  EXPECT_ERROR(verify(directory_ / "nowhere"), ErrorCode::not_found, "nowhere");
  EXPECT_ERROR(verify(directory_.path()), ErrorCode::not_found, "no checkpoint in this directory");
}

TEST_F(VerifyTest, ANameThatIsTooLongIsAnErrorOfTheSystem) {
  EXPECT_ERROR(verify(directory_ / std::string(300, 'a')), ErrorCode::io, "File name too long");
  // The longest name that a file may have: that of its sidecar would be longer.
  const std::string suffix = ".safetensors";
  const fs::path path = directory_ / (std::string(255 - suffix.size(), 'a') + suffix);
  Bytes bytes = safetensors::write_header({{"a", DType::float32, {}, 0, 4}}, {});
  bytes.resize(bytes.size() + 4);
  write_new_file(path, bytes);
  const VerifyReport report = verify(path);
  EXPECT_TRUE(report.good()) << all_problems(report);
  EXPECT_FALSE(report.has_sidecar);
}

TEST_F(VerifyTest, ALinkToItselfBesideTheFilesIsNoFile) {
  fs::create_symlink("loop", checkpoint_ / "loop");
  const VerifyReport report = verify(checkpoint_);
  EXPECT_TRUE(report.good()) << all_problems(report);
  EXPECT_EQ(report.other_files, std::vector<std::string>());
}

TEST_F(VerifyTest, ProblemsBeyondTheLimitAreCounted) {
  for (const fs::directory_entry& file : fs::directory_iterator(checkpoint_)) {
    if (file.path().extension() == ".distcp") fs::resize_file(file.path(), 10);
  }
  VerifyOptions options;
  options.max_problems = 3;
  const VerifyReport report = verify(checkpoint_, options);
  EXPECT_EQ(report.problems.size(), 3u);
  EXPECT_GT(report.problem_count, 10u);
}

}  // namespace
}  // namespace tessera::checkpoint
