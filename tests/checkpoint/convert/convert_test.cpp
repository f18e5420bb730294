#include "tessera/checkpoint/convert.h"

#include <gtest/gtest.h>

#include "support/error_matchers.h"
#include "support/golden.h"
#include "support/temporary_directory.h"
#include "support/torch_file.h"
#include "tessera/checkpoint/diff.h"
#include "tessera/checkpoint/sidecar.h"
#include "tessera/checkpoint/verify.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;
using testing::Golden;
using testing::TemporaryDirectory;

std::shared_ptr<const Checkpoint> converted(const fs::path& from, const fs::path& to, SourceKind kind) {
  ConvertOptions options;
  options.to = kind;
  convert(Checkpoint::open(from), to, options);
  return Checkpoint::open(to);
}

void expect_same(const fs::path& a, const fs::path& b) {
  const DiffReport report = diff(Checkpoint::open(a), Checkpoint::open(b));
  for (const Difference& difference : report.differences) ADD_FAILURE() << to_string(difference);
}

void expect_verified(const fs::path& path) {
  const VerifyReport report = verify(path);
  for (const Problem& problem : report.problems) ADD_FAILURE() << problem.what;
}

std::vector<std::string> names_in(const fs::path& directory) {
  std::vector<std::string> names;
  for (const fs::directory_entry& entry : fs::directory_iterator(directory)) {
    names.push_back(entry.path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

class ConvertGoldenTest : public ::testing::TestWithParam<std::string> {
 protected:
  const Golden golden_ = testing::read_golden(GetParam());
  const TemporaryDirectory directory_;
};

TEST_P(ConvertGoldenTest, ThroughAllFormatsAndBackNothingChanges) {
  const std::vector<std::pair<std::string, SourceKind>> steps = {{"a", SourceKind::safetensors},
                                                                 {"b", SourceKind::dcp},
                                                                 {"c.pt", SourceKind::torch},
                                                                 {"d", SourceKind::dcp},
                                                                 {"e.safetensors", SourceKind::safetensors}};
  fs::path from = golden_.checkpoint;
  for (const auto& [name, kind] : steps) {
    const fs::path to = directory_ / name;
    EXPECT_EQ(testing::read_tensors(converted(from, to, kind)), golden_.tensors) << name;
    expect_same(from, to);
    expect_verified(to);
    from = to;
  }
  expect_same(golden_.checkpoint, from);
}

TEST_P(ConvertGoldenTest, ReshardedForAnyRanksAndDimensionNothingChanges) {
  const auto source = Checkpoint::open(golden_.checkpoint);
  for (const std::int64_t dim : {0, 1, -1}) {
    for (std::int64_t ranks = 1; ranks <= 7; ++ranks) {
      ReshardOptions options;
      options.ranks = ranks;
      options.dim = dim;
      const fs::path to = directory_ / fmt::format("dim{}-ranks{}", dim, ranks);
      reshard(source, to, options);
      EXPECT_EQ(testing::read_tensors(Checkpoint::open(to)), golden_.tensors) << to;
      expect_same(golden_.checkpoint, to);
      expect_verified(to);
    }
  }
}

TEST_P(ConvertGoldenTest, ReshardedLikeAnotherItHasItsBoxes) {
  const auto source = Checkpoint::open(golden_.checkpoint);
  ReshardOptions options;
  options.ranks = 3;
  reshard(source, directory_ / "three", options);
  ReshardOptions like;
  like.like = source;
  reshard(Checkpoint::open(directory_ / "three"), directory_ / "like", like);
  const auto result = Checkpoint::open(directory_ / "like");
  EXPECT_EQ(testing::read_tensors(result), golden_.tensors);
  for (const TensorInfo& tensor : source->tensors()) {
    const TensorInfo& other = result->tensors()[*result->find_tensor(tensor.name)];
    std::size_t with_elements = 0;
    for (std::size_t c = 0; c < tensor.chunks.size(); ++c) {
      with_elements += static_cast<std::size_t>(!is_empty(tensor.chunks[c]));
    }
    EXPECT_EQ(other.chunks.size(), std::max<std::size_t>(with_elements, 1)) << tensor.name;
  }
}

INSTANTIATE_TEST_SUITE_P(Checkpoints, ConvertGoldenTest, ::testing::ValuesIn(testing::golden_names()),
                         [](const auto& test) { return testing::test_name(test.param); });

class ConvertTest : public ::testing::Test {
 protected:
  const Golden golden_ = testing::read_golden("2.14-optim");
  const TemporaryDirectory directory_;
  const std::shared_ptr<const Checkpoint> source_ = Checkpoint::open(golden_.checkpoint);
};

TEST_F(ConvertTest, ASelectionTakesWhatMatchesAndLeavesWhatIsExcluded) {
  ConvertOptions options;
  options.to = SourceKind::dcp;
  options.selection = {{"model.*"}, {"*.bias"}};
  convert(source_, directory_ / "out", options);
  const auto result = Checkpoint::open(directory_ / "out");
  ASSERT_EQ(result->tensors().size(), 2u);
  EXPECT_TRUE(result->find_tensor("model.0.weight"));
  EXPECT_TRUE(result->find_tensor("model.2.weight"));
  EXPECT_TRUE(result->objects().empty());
}

TEST_F(ConvertTest, FloatingPointTensorsBecomeTheDTypeAskedFor) {
  ConvertOptions options;
  options.to = SourceKind::safetensors;
  options.dtype = DType::bfloat16;
  convert(source_, directory_ / "out", options);
  const auto result = Checkpoint::open(directory_ / "out");
  for (const TensorInfo& tensor : result->tensors()) EXPECT_EQ(tensor.dtype, DType::bfloat16) << tensor.name;
}

TEST_F(ConvertTest, SafetensorsAreCutAtTheSizeLimitBetweenTensors) {
  ConvertOptions options;
  options.to = SourceKind::safetensors;
  options.max_shard_bytes = 1000;
  const ConvertReport report = convert(source_, directory_ / "out", options);
  EXPECT_GT(report.files.size(), 3u);
  EXPECT_TRUE(fs::exists(directory_ / "out" / "model.safetensors.index.json"));
  EXPECT_EQ(testing::read_tensors(Checkpoint::open(directory_ / "out")), golden_.tensors);
  expect_same(golden_.checkpoint, directory_ / "out");
  expect_verified(directory_ / "out");
}

TEST_F(ConvertTest, EveryOfSeveralSafetensorsFilesSaysTheDTypesThatTheFormatLacks) {
  testing::TorchFile file;
  file.storages = {Bytes(32, 7), Bytes(2, 9), Bytes(1, 0x5a)};
  file.add("pairs", DType::complex128, 0, 0, {2}, {1});
  file.add("bits", DType::bits16, 1, 0, {1}, {1});
  file.add("lone", DType::float4_e2m1fn_x2, 2, 0, {}, {});
  testing::overwrite_file(directory_ / "in.pt", file.bytes());
  ConvertOptions options;
  options.to = SourceKind::safetensors;
  options.max_shard_bytes = 1;
  EXPECT_EQ(convert(Checkpoint::open(directory_ / "in.pt"), directory_ / "out", options).files.size(),
            4u);  // including the index
  expect_same(directory_ / "in.pt", directory_ / "out");
}

// The root of a state dict is a dict: PyTorch's own dcp_to_torch_save fails if a path begins with an index.
TEST_F(ConvertTest, AListOfTensorsGetsKeysForItsIndicesInDcp) {
  Bytes data_pkl;
  pickle::Writer writer(data_pkl, 2);
  torch_archive::TensorRef tensor;
  tensor.storage = {"0", "cpu", DType::float32, 4};
  writer.empty_list();
  writer.mark();
  torch_archive::write_tensor(writer, tensor);
  writer.appends();
  writer.stop();
  const Bytes storage(4, 3);
  const std::vector<std::uint32_t> crcs = {crc32(storage)};
  const torch_archive::ArchiveLayout layout("archive", std::move(data_pkl), {{"0", 4}});
  Bytes bytes = layout.before_storage(0, crcs);
  append(bytes, storage);
  append(bytes, layout.trailer(crcs));
  testing::overwrite_file(directory_ / "in.pt", bytes);
  const auto result = converted(directory_ / "in.pt", directory_ / "out", SourceKind::dcp);
  ASSERT_EQ(result->tensors().size(), 1u);
  EXPECT_EQ(result->tensors()[0].name, "0");
  EXPECT_EQ(result->tensors()[0].path, Path{std::string("0")});
}

TEST_F(ConvertTest, DcpFilesAreCutAtTheSizeLimit) {
  ReshardOptions options;
  options.ranks = 2;
  options.max_shard_bytes = 4000;
  reshard(source_, directory_ / "out", options);
  EXPECT_TRUE(fs::exists(directory_ / "out" / "__0_1.distcp"));
  EXPECT_EQ(testing::read_tensors(Checkpoint::open(directory_ / "out")), golden_.tensors);
}

TEST_F(ConvertTest, ADryRunReportsTheFilesAndWritesNone) {
  ConvertOptions options;
  options.to = SourceKind::torch;
  options.dry_run = true;
  const ConvertReport planned = convert(source_, directory_ / "out.pt", options);
  EXPECT_TRUE(names_in(directory_.path()).empty());
  options.dry_run = false;
  const ConvertReport done = convert(source_, directory_ / "out.pt", options);
  ASSERT_EQ(planned.files.size(), 1u);
  EXPECT_EQ(planned.files[0].size_bytes, fs::file_size(directory_ / "out.pt"));
  EXPECT_EQ(done.files[0].size_bytes, planned.files[0].size_bytes);
}

TEST_F(ConvertTest, OutputIsTheSameWhateverTheNumberOfThreads) {
  for (const SourceKind kind : {SourceKind::torch, SourceKind::safetensors}) {
    ConvertOptions options;
    options.to = kind;
    options.jobs = 1;
    const std::string extension = kind == SourceKind::torch ? ".pt" : ".safetensors";
    convert(source_, directory_ / ("a" + extension), options);
    fs::create_directory(directory_ / "other");
    options.jobs = 7;
    convert(source_, directory_.path() / "other" / ("a" + extension), options);
    EXPECT_EQ(read_file(directory_ / ("a" + extension)), read_file(directory_.path() / "other" / ("a" + extension)));
  }
}

TEST_F(ConvertTest, ADestinationThatExistsIsLeftAlone) {
  write_new_file(directory_ / "out.pt", as_bytes("mine"));
  ConvertOptions options;
  options.to = SourceKind::torch;
  EXPECT_ERROR(convert(source_, directory_ / "out.pt", options), ErrorCode::invalid_argument, "out.pt", "exists");
  EXPECT_EQ(as_text(read_file(directory_ / "out.pt")), "mine");
  EXPECT_EQ(names_in(directory_.path()), std::vector<std::string>{"out.pt"});
}

TEST_F(ConvertTest, ADestinationThatIsTheSourceOrWithinItIsRefused) {
  fs::copy(golden_.checkpoint, directory_ / "ck", fs::copy_options::recursive);
  const auto source = Checkpoint::open(directory_ / "ck");
  ConvertOptions options;
  options.to = SourceKind::dcp;
  EXPECT_ERROR(convert(source, directory_ / "ck", options), ErrorCode::invalid_argument, "is the source");
  EXPECT_ERROR(convert(source, directory_.path() / "x" / ".." / "ck" / ".", options), ErrorCode::invalid_argument,
               "is the source");
  EXPECT_ERROR(convert(source, directory_.path() / "ck" / "out", options), ErrorCode::invalid_argument, "within");
  EXPECT_ERROR(convert(source, directory_.path() / "nowhere" / "out", options), ErrorCode::not_found, "does not exist");
}

TEST_F(ConvertTest, DamagedDataIsFoundOnTheWayAndNothingIsLeft) {
  for (const SourceKind kind : {SourceKind::dcp, SourceKind::safetensors, SourceKind::torch}) {
    const TemporaryDirectory work;
    fs::copy(golden_.checkpoint, work / "ck", fs::copy_options::recursive);
    const auto before = Checkpoint::open(work / "ck");
    const std::size_t tensor = *before->find_tensor("optim.state.2.exp_avg");
    const Extent extent = before->locate(tensor, 0);
    const fs::path file = work.path() / "ck" / before->files()[extent.file].name;
    Bytes bytes = read_file(file);
    bytes[extent.offset_bytes + 5] ^= 0x10;
    testing::overwrite_file(file, bytes);
    ConvertOptions options;
    options.to = kind;
    EXPECT_ERROR(convert(Checkpoint::open(work / "ck"), work / "out", options), ErrorCode::corrupt,
                 "optim.state.2.exp_avg", file.string(), fmt::format("at byte {}", extent.offset_bytes), "CRC-32");
    EXPECT_EQ(names_in(work.path()), std::vector<std::string>{"ck"});
  }
}

TEST_F(ConvertTest, CancellationLeavesNothing) {
  Cancellation cancellation;
  cancellation.request();
  ConvertOptions options;
  options.to = SourceKind::safetensors;
  options.cancellation = &cancellation;
  EXPECT_ERROR(convert(source_, directory_ / "out", options), ErrorCode::cancelled, "interrupted");
  EXPECT_TRUE(names_in(directory_.path()).empty());
}

TEST_F(ConvertTest, WhatAKilledProcessLeftIsRemoved) {
  fs::create_directories(directory_ / ".out.tessera-999999-0.partial");
  write_new_file(directory_.path() / ".out.tessera-999999-0.partial" / "x", as_bytes("old"));
  ConvertOptions options;
  options.to = SourceKind::dcp;
  convert(source_, directory_ / "out", options);
  EXPECT_EQ(names_in(directory_.path()), std::vector<std::string>{"out"});
}

TEST_F(ConvertTest, TheSidecarOfADirectoryNamesEveryFile) {
  ConvertOptions options;
  options.to = SourceKind::dcp;
  convert(source_, directory_ / "out", options);
  const auto sidecar = read_sidecar(directory_ / "out");
  ASSERT_TRUE(sidecar);
  std::vector<std::string> listed;
  for (const auto& [name, facts] : sidecar->files) {
    listed.push_back(name);
    const Bytes bytes = read_file(directory_.path() / "out" / name);
    EXPECT_EQ(facts.size_bytes, bytes.size());
    EXPECT_EQ(facts.crc32, crc32(bytes)) << name;
  }
  listed.emplace_back(".tessera.json");
  std::sort(listed.begin(), listed.end());
  EXPECT_EQ(names_in(directory_ / "out"), listed);
}

TEST_F(ConvertTest, RanksOutOfRangeAreRefused) {
  ReshardOptions options;
  options.ranks = 0;
  EXPECT_ERROR(reshard(source_, directory_ / "out", options), ErrorCode::invalid_argument, "0 ranks");
}

}  // namespace
}  // namespace tessera::checkpoint
