#include "tessera/checkpoint/convert.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "support/chaos.h"
#include "support/child_process.h"
#include "support/error_matchers.h"
#include "support/golden.h"
#include "support/temporary_directory.h"
#include "support/thread_ranks.h"
#include "support/torch_file.h"
#include "tessera/base/function_ref.h"
#include "tessera/checkpoint/diff.h"
#include "tessera/checkpoint/sidecar.h"
#include "tessera/checkpoint/verify.h"
#include "tessera/format/dcp_metadata.h"
#include "tessera/format/safetensors.h"

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

// Returns the contents of all files in a directory and below, by path.
std::map<std::string, Bytes> contents_below(const fs::path& directory) {
  std::map<std::string, Bytes> contents;
  for (const fs::directory_entry& entry : fs::recursive_directory_iterator(directory)) {
    if (entry.is_regular_file()) contents[entry.path().lexically_relative(directory)] = read_file(entry.path());
  }
  return contents;
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
  testing::SampleIfSanitized sample(6);
  for (const std::int64_t dim : {0, 1, -1}) {
    for (std::int64_t ranks = 1; ranks <= 7; ++ranks) {
      if (!sample.takes_next()) continue;
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

// PyTorch: consolidate_safetensors_files with fqn_to_index_mapping.
TEST_F(ConvertTest, TensorsGoToTheFilesThatAMapStates) {
  ConvertOptions options;
  options.to = SourceKind::safetensors;
  for (std::size_t i = 0; i < source_->tensors().size(); ++i) {
    options.file_of_tensor[source_->tensors()[i].name] = i % 2 == 0 ? 2 : i % 3 == 0 ? 3 : 1;
  }
  options.file_of_tensor["of another checkpoint"] = 9;
  convert(source_, directory_ / "out", options);
  const auto result = Checkpoint::open(directory_ / "out");
  for (const TensorInfo& tensor : result->tensors()) {
    EXPECT_EQ(result->files()[tensor.stored.at(0).file].name,
              fmt::format("model-0000{}-of-00003.safetensors", options.file_of_tensor.at(tensor.name)));
  }
  EXPECT_EQ(testing::read_tensors(result), golden_.tensors);
  expect_same(golden_.checkpoint, directory_ / "out");
  expect_verified(directory_ / "out");

  const std::string first = source_->tensors()[0].name;
  const auto refuse = [&](FunctionRef<void(ConvertOptions&)> spoil, const fs::path& to, const std::string& what) {
    ConvertOptions wrong = options;
    spoil(wrong);
    EXPECT_ERROR(convert(source_, to, wrong), ErrorCode::invalid_argument, what);
    EXPECT_FALSE(fs::exists(to));
  };
  const fs::path to = directory_ / "refused";
  refuse([&](ConvertOptions& wrong) { wrong.file_of_tensor.erase(first); }, to,
         "file_of_tensor has nothing for '" + first);
  refuse([&](ConvertOptions& wrong) { wrong.file_of_tensor[first] = 0; }, to, "file_of_tensor has 0 for '" + first);
  refuse([&](ConvertOptions& wrong) { wrong.file_of_tensor[first] = 5; }, to, "has no tensor of file 4");
  refuse([&](ConvertOptions& wrong) { wrong.max_shard_bytes = 9; }, to, "without a limit on shard size");
  refuse([&](ConvertOptions& wrong) { wrong.to = SourceKind::dcp; }, to, "only for a directory of safetensors");
  refuse([](ConvertOptions&) {}, directory_ / "refused.safetensors", "only for a directory of safetensors");
}

// PyTorch: consolidate_safetensors_files_on_every_rank.
TEST_F(ConvertTest, SeveralRanksWriteTheFilesThatOneWrites) {
  ConvertOptions options;
  options.to = SourceKind::safetensors;
  for (const std::uint64_t limit : {std::uint64_t{1000}, std::uint64_t{0}}) {
    options.max_shard_bytes = limit;
    for (const char* name : {"model", "model.safetensors"}) {
      if (limit != 0 && fs::path(name).has_extension()) continue;
      const TemporaryDirectory alone, together;
      const ConvertReport expected = convert(source_, alone / name, options);
      for (const int ranks : {2, 3}) {
        const fs::path to = together.path() / std::to_string(ranks);
        fs::create_directory(to);
        const auto errors = testing::run_thread_ranks(ranks, [&](testing::ThreadLink& link) {
          const ConvertReport report = convert(Checkpoint::open(golden_.checkpoint), to / name, options, link);
          EXPECT_EQ(report.files.size(), expected.files.size());
          EXPECT_EQ(report.tensor_bytes, expected.tensor_bytes);
        });
        EXPECT_THAT(errors, ::testing::Each(""));
        EXPECT_EQ(contents_below(to), contents_below(alone.path()));
        expect_verified(to / name);
      }
    }
  }
}

TEST_F(ConvertTest, IfOneOfSeveralRanksFailsNothingIsLeft) {
  ConvertOptions options;
  options.to = SourceKind::safetensors;
  options.max_shard_bytes = 1000;
  const TemporaryDirectory to;
  Cancellation cancelled;
  cancelled.request();
  const auto convert_on = [&](FunctionRef<void(ConvertOptions&, int rank)> spoil) {
    return testing::run_thread_ranks(3, [&](testing::ThreadLink& link) {
      ConvertOptions mine = options;
      spoil(mine, link.rank());
      convert(source_, to / "out", mine, link);
    });
  };
  EXPECT_THAT(convert_on([&](ConvertOptions& mine, int rank) { mine.cancellation = rank == 1 ? &cancelled : nullptr; }),
              ::testing::Each(::testing::HasSubstr("cancelled: ")));
  EXPECT_TRUE(fs::is_empty(to.path()));
  EXPECT_THAT(convert_on([&](ConvertOptions& mine, int) { mine.to = SourceKind::dcp; }),
              ::testing::Each(::testing::HasSubstr("by several ranks to dcp, expected safetensors")));
  fs::create_directory(to / "out");
  EXPECT_THAT(convert_on([&](ConvertOptions&, int) {}), ::testing::Each(::testing::HasSubstr("invalid_argument: ")));
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
  EXPECT_ERROR(convert(source, "", options), ErrorCode::invalid_argument, "the destination is empty, expected a path");
  EXPECT_ERROR(convert(source, directory_ / "ck", options), ErrorCode::invalid_argument, "is the source");
  EXPECT_ERROR(convert(source, directory_.path() / "x" / ".." / "ck" / ".", options), ErrorCode::invalid_argument,
               "is the source");
  EXPECT_ERROR(convert(source, directory_.path() / "ck" / "out", options), ErrorCode::invalid_argument, "within");
  EXPECT_ERROR(convert(source, directory_.path() / "nowhere" / "out", options), ErrorCode::not_found,
               "found no directory", "nowhere, expected the destination's parent");
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

TEST_F(ConvertTest, AFileWhoseNameIsNotUtf8HasASidecar) {
  ConvertOptions options;
  options.to = SourceKind::safetensors;
  convert(source_, directory_ / "\xff.safetensors", options);
  ASSERT_TRUE(read_sidecar(directory_ / "\xff.safetensors"));
  expect_verified(directory_ / "\xff.safetensors");
}

TEST_F(ConvertTest, TensorsWithoutTheDimensionAreShardedInTheirLastOne) {
  ReshardOptions options;
  options.ranks = 3;
  for (const std::int64_t dim : {-1, -9, 9}) {
    options.dim = dim;
    const fs::path to = directory_ / std::to_string(dim);
    reshard(source_, to, options);
    const auto result = Checkpoint::open(to);
    const TensorInfo& tensor = result->tensors()[*result->find_tensor("model.0.weight")];
    EXPECT_EQ(Box(tensor.chunks[0]), Box({0, 0}, {tensor.shape[0], 3})) << dim;
  }
}

TEST_F(ConvertTest, RanksOutOfRangeAreRefused) {
  ReshardOptions options;
  options.ranks = 0;
  EXPECT_ERROR(reshard(source_, directory_ / "out", options), ErrorCode::invalid_argument, "0 ranks");
}

// --- nothing is lost without a word

TEST_F(ConvertTest, MetadataOfSafetensorsIsCarriedComparedAndNamedWhereItCannotBe) {
  const std::vector<safetensors::Tensor> tensors = {{"t", DType::float32, {2}, 0, 8}};
  Bytes bytes = safetensors::write_header(tensors, {{"format", "pt"}, {"license", "MIT"}, {"author", "x"}});
  bytes.resize(bytes.size() + 8);
  write_new_file(directory_ / "in.safetensors", bytes);
  const auto source = Checkpoint::open(directory_ / "in.safetensors");
  const auto copy = converted(directory_ / "in.safetensors", directory_ / "out.safetensors", SourceKind::safetensors);
  EXPECT_EQ(copy->metadata(), source->metadata());
  EXPECT_EQ(copy->metadata().at("license"), "MIT");
  EXPECT_TRUE(diff(source, copy).same());

  Bytes other = safetensors::write_header(tensors, {{"format", "pt"}, {"license", "GPL"}});
  other.resize(other.size() + 8);
  write_new_file(directory_ / "other.safetensors", other);
  const DiffReport report = diff(source, Checkpoint::open(directory_ / "other.safetensors"));
  ASSERT_EQ(report.differences.size(), 2u);
  EXPECT_EQ(to_string(report.differences[0]), "metadata 'author': 'x' and none");
  EXPECT_EQ(to_string(report.differences[1]), "metadata 'license': 'MIT' and 'GPL'");

  std::vector<std::string> warnings;
  ConvertOptions options;
  options.to = SourceKind::dcp;
  options.warn = [&](const std::string& text) { warnings.push_back(text); };
  convert(source, directory_ / "dcp", options);
  EXPECT_EQ(warnings, (std::vector<std::string>{"metadata 'author': only safetensors can store it",
                                                "metadata 'license': only safetensors can store it"}));
}

TEST_F(ConvertTest, ElementsBeyondTheRangeOfTheDtypeAreCounted) {
  testing::TorchFile file;
  const std::vector<float> values = {1, 65519, 65520, -70000, std::numeric_limits<float>::infinity(), NAN};
  Bytes& storage = file.storages.emplace_back(values.size() * 4);
  std::memcpy(storage.data(), values.data(), storage.size());
  file.add("t", DType::float32, 0, 0, {6}, {1});
  write_new_file(directory_ / "in.pt", file.bytes());
  std::vector<std::string> warnings;
  ConvertOptions options;
  options.to = SourceKind::safetensors;
  options.warn = [&](const std::string& text) { warnings.push_back(text); };
  options.dtype = DType::float16;
  convert(Checkpoint::open(directory_ / "in.pt"), directory_ / "half.safetensors", options);
  EXPECT_EQ(
      warnings,
      (std::vector<std::string>{"tensor 't': 2 of 6 elements are beyond the range of float16 and became infinite"}));
  warnings.clear();
  options.dtype = DType::bfloat16;
  convert(Checkpoint::open(directory_ / "in.pt"), directory_ / "b.safetensors", options);
  EXPECT_TRUE(warnings.empty());
}

// --- memory and output follow the files

TEST_F(ConvertTest, RepeatedElementsBeyondTheBudgetNeedAFlag) {
  testing::TorchFile file;
  file.storages.emplace_back(8);
  file.add("small", DType::float32, 0, 0, {2, 1000}, {1, 0});
  file.add("large", DType::float32, 0, 0, {2, (std::int64_t{1} << 32) - 1}, {1, 0});
  write_new_file(directory_ / "in.pt", file.bytes());
  const auto source = Checkpoint::open(directory_ / "in.pt");
  ConvertOptions options;
  options.to = SourceKind::safetensors;
  EXPECT_ERROR(convert(source, directory_ / "out", options), ErrorCode::unsupported, "'large' has 32.0 GiB", "64.0 MiB",
               "--expand");
  EXPECT_ERROR(diff(source, source), ErrorCode::unsupported, "'large'", "--expand");
  // Many tensors of one storage are repeated too.
  testing::TorchFile tied;
  tied.storages.emplace_back(1 << 20);
  for (int i = 0; i < 90; ++i) tied.add(fmt::format("t{}", i), DType::uint8, 0, 0, {1 << 20}, {1});
  write_new_file(directory_ / "tied.pt", tied.bytes());
  EXPECT_ERROR(convert(Checkpoint::open(directory_ / "tied.pt"), directory_ / "out", options), ErrorCode::unsupported,
               "90.0 MiB");
  options.expand = true;
  convert(Checkpoint::open(directory_ / "tied.pt"), directory_ / "out", options);
  expect_same(directory_ / "out", directory_ / "out");
  options.expand = false;
  options.selection = {{"small"}, {}};
  convert(source, directory_ / "small.safetensors", options);
}

TEST_F(ConvertTest, ADescriptionOfAHugeTensorTakesNoMemory) {
  dcp::Metadata metadata;
  metadata.files = {"__0_0.distcp"};
  metadata.entries.resize(1);
  dcp::MetadataEntry& entry = metadata.entries[0];
  entry.name = "t";
  entry.is_tensor = true;
  entry.properties.dtype = DType::float32;
  entry.shape = {std::int64_t{1} << 50};
  entry.chunks = BoxList({Box::full(entry.shape)});
  entry.items = {{0, 0, 0, 100}};
  fs::create_directory(directory_ / "huge");
  write_new_file(directory_ / "huge" / ".metadata", dcp::write(metadata));
  write_new_file(directory_ / "huge" / "__0_0.distcp", Bytes(100));
  const auto source = Checkpoint::open(directory_ / "huge");
  EXPECT_ERROR(diff(source, source), ErrorCode::unsupported, "'t'");
  DiffOptions options;
  options.expand = true;
  EXPECT_ERROR(diff(source, source, options), ErrorCode::corrupt, "__0_0.distcp", "'t'");
}

TEST_F(ConvertTest, AnEmptyTensorOfAHugeShapeIsReadAsItWasWritten) {
  testing::TorchFile file;
  file.storages.emplace_back(0);
  file.add("t", DType::float16, 0, 0, {0, std::int64_t{1} << 61}, {1, 1});
  write_new_file(directory_ / "in.pt", file.bytes());
  for (const SourceKind kind : {SourceKind::dcp, SourceKind::safetensors, SourceKind::torch}) {
    const fs::path to = directory_ / fmt::format("out-{}", source_kind_name(kind));
    EXPECT_EQ(converted(directory_ / "in.pt", to, kind)->tensors()[0].shape,
              (std::vector<std::int64_t>{0, std::int64_t{1} << 61}));
    expect_same(directory_ / "in.pt", to);
    EXPECT_EQ(converted(to, to.string() + ".pt", SourceKind::torch)->tensors().size(), 1u);
  }
}

// --- two at once

TEST_F(ConvertTest, OfManyConversionsIntoOneFileOneWinsAndItsSidecarIsThere) {
  const fs::path to = directory_ / "X.safetensors";
  for (int round = 0; round < 20 * testing::chaos_factor(); ++round) {
    std::vector<pid_t> children;
    for (int i = 0; i < 4; ++i) {
      children.push_back(testing::start_child([&] {
        ConvertOptions options;
        options.to = SourceKind::safetensors;
        options.selection.exclude = {fmt::format("model.{}.*", i)};  // so that the files differ
        convert(source_, to, options);
      }));
    }
    int winners = 0;
    for (const pid_t child : children) winners += testing::wait_for_child(child) == 0 ? 1 : 0;
    EXPECT_EQ(winners, 1);
    const VerifyReport report = verify(to);
    EXPECT_TRUE(report.good() && report.sidecar_agrees);
    EXPECT_EQ(names_in(directory_.path()), (std::vector<std::string>{"X.safetensors", "X.safetensors.tessera.json"}));
    fs::remove(to);
    fs::remove(sidecar_path(to));
  }
}

}  // namespace
}  // namespace tessera::checkpoint
