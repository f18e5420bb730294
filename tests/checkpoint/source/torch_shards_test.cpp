// Directories of torch.save files with an index, and indices as arguments.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "support/error_matchers.h"
#include "support/temporary_directory.h"
#include "support/torch_file.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/convert.h"
#include "tessera/checkpoint/diff.h"
#include "tessera/checkpoint/manage/add_sidecar.h"
#include "tessera/checkpoint/storage.h"
#include "tessera/checkpoint/verify.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

class TorchShardsTest : public ::testing::Test {
 protected:
  TorchShardsTest() {
    write("pytorch_model-00001-of-00002.bin", {"a", "b"}, 1);
    write("pytorch_model-00002-of-00002.bin", {"c"}, 2);
    write_index(R"({"a": "pytorch_model-00001-of-00002.bin", "b": "pytorch_model-00001-of-00002.bin",
                    "c": "pytorch_model-00002-of-00002.bin"})");
  }
  void write(const std::string& name, const std::vector<std::string>& tensors, std::uint8_t value) const {
    testing::TorchFile file;
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      file.storages.emplace_back(16, static_cast<std::uint8_t>(value + 16 * i));
      file.add(tensors[i], DType::int32, i, 0, {4}, {1});
    }
    testing::overwrite_file(path(name), file.bytes());
  }
  void write_index(const std::string& weight_map) const {
    testing::overwrite_file(path("pytorch_model.bin.index.json"),
                            as_bytes(R"({"metadata": {"total_size": 48}, "weight_map": )" + weight_map + "}"));
  }
  fs::path path(const std::string& name = "") const { return name.empty() ? directory_.path() : directory_ / name; }

 private:
  testing::TemporaryDirectory directory_;
};

TEST_F(TorchShardsTest, TheTensorsOfAllFilesAreOneCheckpoint) {
  const auto opened = Checkpoint::open(path());
  EXPECT_EQ(opened->kind(), SourceKind::torch);
  ASSERT_EQ(opened->tensors().size(), 3u);
  EXPECT_EQ(opened->files().size(), 2u);
  EXPECT_EQ(opened->description_files(), std::vector<std::string>{"pytorch_model.bin.index.json"});
  const std::map<std::string, int> expected = {{"a", 1}, {"b", 17}, {"c", 2}};
  for (std::size_t i = 0; i < 3; ++i) {
    const Extent extent = opened->locate(i, 0);
    Bytes bytes(extent.length_bytes);
    opened->open_file(extent.file)->read_at(extent.offset_bytes, bytes);
    EXPECT_EQ(bytes, Bytes(16, static_cast<std::uint8_t>(expected.at(opened->tensors()[i].name))));
    EXPECT_EQ(opened->tensors()[i].position, i);
  }
}

TEST_F(TorchShardsTest, TheFilesAreReadFromTheStorage) {
  const auto storage = memory_storage();
  for (const auto& entry : fs::directory_iterator(path())) {
    write_new_file(*storage, entry.path().filename().string(), read_file(entry.path()));
  }
  const auto opened = Checkpoint::open(storage);
  ASSERT_EQ(opened->tensors().size(), 3u);
  EXPECT_TRUE(diff(opened, Checkpoint::open(path())).same());
}

TEST_F(TorchShardsTest, TheIndexStandsForTheDirectory) {
  EXPECT_EQ(Checkpoint::open(path("pytorch_model.bin.index.json"))->tensors().size(), 3u);
  EXPECT_EQ(Checkpoint::open(path("pytorch_model-00002-of-00002.bin"))->tensors().size(), 1u);
}

TEST_F(TorchShardsTest, VerifyConvertDiffAndSumWork) {
  const VerifyReport report = verify(path());
  EXPECT_TRUE(report.good()) << (report.problems.empty() ? "" : report.problems[0].what);
  EXPECT_EQ(report.files, 2u);
  EXPECT_TRUE(report.other_files.empty());
  const testing::TemporaryDirectory out;
  ConvertOptions options;
  options.to = SourceKind::safetensors;
  const auto opened = Checkpoint::open(path());
  convert(opened, out / "model.safetensors", options);
  EXPECT_TRUE(diff(opened, Checkpoint::open(out / "model.safetensors"), {}).same());
  EXPECT_EQ(add_sidecar(path()).files, 3u);
  EXPECT_TRUE(verify(path()).sidecar_agrees);
  testing::put_byte(path("pytorch_model-00002-of-00002.bin"),
                    static_cast<std::int64_t>(opened->locate(2, 0).offset_bytes), 0x55);
  const VerifyReport damaged = verify(path());
  EXPECT_FALSE(damaged.good());
  EXPECT_THAT(damaged.problems[0].what, HasSubstr("00002-of-00002.bin"));
}

TEST_F(TorchShardsTest, TensorsAtTheSameOffsetOfTwoFilesAreNotTied) {
  write("pytorch_model-00001-of-00002.bin", {"a"}, 1);
  write("pytorch_model-00002-of-00002.bin", {"c"}, 2);
  write_index(R"({"a": "pytorch_model-00001-of-00002.bin", "c": "pytorch_model-00002-of-00002.bin"})");
  const auto opened = Checkpoint::open(path());
  ASSERT_EQ(opened->locate(0, 0).offset_bytes, opened->locate(1, 0).offset_bytes);
  const testing::TemporaryDirectory out;
  ConvertOptions options;
  options.to = SourceKind::torch;
  convert(opened, out / "model.pt", options);
  EXPECT_TRUE(diff(opened, Checkpoint::open(out / "model.pt"), {}).same());
}

TEST_F(TorchShardsTest, DamageIsFoundWithoutASidecarToo) {
  const auto opened = Checkpoint::open(path());
  testing::put_byte(path("pytorch_model-00002-of-00002.bin"),
                    static_cast<std::int64_t>(opened->locate(2, 0).offset_bytes), 0x55);
  const VerifyReport report = verify(path());
  ASSERT_EQ(report.problem_count, 1u);
  EXPECT_EQ(report.problems[0].name, "c");
}

TEST_F(TorchShardsTest, AnIndexThatDoesNotMatchIsRefused) {
  write_index(R"({"a": "pytorch_model-00001-of-00002.bin"})");
  EXPECT_ERROR(Checkpoint::open(path()), ErrorCode::corrupt, "it does not list 'b'");
  write_index(R"({"a": "pytorch_model-00001-of-00002.bin", "b": "pytorch_model-00001-of-00002.bin",
                  "c": "pytorch_model-00001-of-00002.bin"})");
  EXPECT_ERROR(Checkpoint::open(path()), ErrorCode::corrupt, "it lists 'c'", "which does not have it");
  write_index(R"({"a": "lost.bin"})");
  EXPECT_ERROR(Checkpoint::open(path()), ErrorCode::corrupt, "'lost.bin' is missing, expected it for 'a'");
  write_index(R"({"a": "../x.bin"})");
  EXPECT_ERROR(Checkpoint::open(path()), ErrorCode::corrupt, "../x.bin");
}

TEST_F(TorchShardsTest, FilesWithoutAnIndexAreNamed) {
  fs::remove(path("pytorch_model.bin.index.json"));
  EXPECT_ERROR(Checkpoint::open(path()), ErrorCode::not_found, "no checkpoint in this directory",
               "it has 'pytorch_model-00001-of-00002.bin' and 1 more files: pass one of them");
}

TEST_F(TorchShardsTest, OneOfSeveralIndicesMustBePassed) {
  fs::rename(path("pytorch_model.bin.index.json"), path("a.bin.index.json"));
  EXPECT_EQ(Checkpoint::open(path())->tensors().size(), 3u);
  fs::copy(path("a.bin.index.json"), path("b.bin.index.json"));
  EXPECT_ERROR(Checkpoint::open(path()), ErrorCode::invalid_argument, "found 2 indices", "'a.bin.index.json'");
  EXPECT_EQ(Checkpoint::open(path("b.bin.index.json"))->tensors().size(), 3u);
}

}  // namespace
}  // namespace tessera::checkpoint
