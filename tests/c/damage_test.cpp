// Damaged checkpoints through the C interface.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "support/golden.h"
#include "support/safetensors_file.h"
#include "support/temporary_directory.h"
#include "tessera/c/tessera.h"

namespace tessera::c {
namespace {

using DamagedCheckpoint = std::unique_ptr<tessera_checkpoint, void (*)(tessera_checkpoint*)>;

DamagedCheckpoint open_damaged(const std::string& path) {
  tessera_checkpoint* checkpoint = nullptr;
  EXPECT_EQ(tessera_open(path.c_str(), nullptr, &checkpoint), TESSERA_OK) << tessera_last_error();
  return {checkpoint, tessera_close};
}

TEST(CDamageTest, IsReportedByVerifyAndNamedByARead) {
  const testing::TemporaryDirectory directory;
  const std::filesystem::path copy = directory.path() / "copy";
  std::filesystem::copy(testing::read_golden("2.6-sharded").checkpoint, copy, std::filesystem::copy_options::recursive);
  const DamagedCheckpoint checkpoint = open_damaged(copy);
  tessera_tensor_info info{};
  tessera_chunk_info chunk{};
  ASSERT_EQ(tessera_tensor(checkpoint.get(), 0, &info), TESSERA_OK);
  ASSERT_EQ(tessera_chunk(checkpoint.get(), 0, 0, &chunk), TESSERA_OK);
  std::filesystem::resize_file(copy / tessera_file_name(checkpoint.get(), chunk.file), chunk.offset_bytes + 10);
  std::uint64_t problems = 0;
  tessera_bytes* text = nullptr;
  ASSERT_EQ(tessera_verify(copy.c_str(), nullptr, &problems, &text), TESSERA_OK) << tessera_last_error();
  EXPECT_GT(problems, 0u);
  const std::string report(tessera_bytes_data(text), tessera_bytes_size(text));
  EXPECT_EQ(nlohmann::json::parse(report).at("good"), false);
  tessera_bytes_free(text);
  Bytes data(info.size_bytes);
  EXPECT_EQ(tessera_read_tensor(checkpoint.get(), info.name, data.data(), data.size(), nullptr), TESSERA_CORRUPT);
  EXPECT_THAT(tessera_last_error(), ::testing::HasSubstr(".distcp"));
}

// A tensor whose rows have a block of the sidecar each, and its column 7.
class CColumnTest : public ::testing::Test {
 protected:
  static constexpr std::int64_t kRows = 4, kColumns = 32768;

  CColumnTest() {
    testing::SafetensorsFile file;
    std::vector<float> values;
    for (std::int64_t i = 0; i < kRows * kColumns; ++i) values.push_back(static_cast<float>(i));
    file.add("w", DType::float32, {kRows, kColumns}, values);
    file.write(directory_ / "source.safetensors");
    const DamagedCheckpoint source = open_damaged(directory_ / "source.safetensors");
    EXPECT_EQ(tessera_convert(source.get(), path_.c_str(), "safetensors", nullptr, nullptr), TESSERA_OK)
        << tessera_last_error();
  }

  // Changes an element of the second row.
  void damage() const {
    const DamagedCheckpoint checkpoint = open_damaged(path_);
    tessera_chunk_info chunk{};
    ASSERT_EQ(tessera_chunk(checkpoint.get(), 0, 0, &chunk), TESSERA_OK);
    testing::put_byte(path_, chunk.offset_bytes + kColumns * 4 + 7 * 4, 0x55);
  }

  tessera_status read_column(bool compare_rest, tessera_read_report* report) {
    const DamagedCheckpoint checkpoint = open_damaged(path_);
    const char* const name = "w";
    const size_t dims = 2, bytes = sizeof column_;
    const std::int64_t offsets[] = {0, 7}, sizes[] = {kRows, 1};
    void* const data = column_;
    tessera_boxes boxes{};
    boxes.struct_size = sizeof boxes;
    boxes.count = 1;
    boxes.names = &name;
    boxes.dims = &dims;
    boxes.offsets = offsets;
    boxes.sizes = sizes;
    boxes.data = &data;
    boxes.data_bytes = &bytes;
    tessera_read_options options{};
    options.struct_size = sizeof options;
    options.compare_rest = compare_rest ? 1 : 0;
    return tessera_read(checkpoint.get(), &boxes, &options, report);
  }

  const testing::TemporaryDirectory directory_;
  const std::string path_ = directory_ / "w.safetensors";
  float column_[kRows] = {};
};

TEST_F(CColumnTest, BlocksAreCountedOrCompared) {
  tessera_read_report report{};
  ASSERT_EQ(read_column(false, &report), TESSERA_OK) << tessera_last_error();
  EXPECT_GT(report.bytes_not_compared, 0u);
  ASSERT_EQ(read_column(true, &report), TESSERA_OK) << tessera_last_error();
  EXPECT_EQ(report.bytes_not_compared, 0u);
  for (std::int64_t row = 0; row < kRows; ++row) EXPECT_EQ(column_[row], static_cast<float>(row * kColumns + 7));
}

TEST_F(CColumnTest, DamageIsFoundWhereTheRestIsCompared) {
  damage();
  tessera_read_report report{};
  EXPECT_EQ(read_column(false, &report), TESSERA_OK);
  EXPECT_GT(report.bytes_not_compared, 0u);
  EXPECT_EQ(read_column(true, &report), TESSERA_CORRUPT);
  EXPECT_THAT(tessera_last_error(),
              ::testing::AllOf(::testing::HasSubstr("as in the sidecar"), ::testing::HasSubstr("tensor 'w'")));
}

}  // namespace
}  // namespace tessera::c
