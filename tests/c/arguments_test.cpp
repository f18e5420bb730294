// Wrong arguments of the C interface, and calls out of order: each is an error that names what to change, and no crash.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <exception>
#include <filesystem>
#include <functional>
#include <string>
#include <system_error>
#include <vector>

#include "c/call.h"
#include "support/golden.h"
#include "support/temporary_directory.h"
#include "tessera/c/tessera.h"

namespace tessera::c {
namespace {

std::string checkpoint_path() { return testing::read_golden("2.6-sharded").checkpoint; }

void expect_invalid(tessera_status status, const char* message) {
  EXPECT_EQ(status, TESSERA_INVALID_ARGUMENT);
  EXPECT_THAT(tessera_last_error(), ::testing::HasSubstr(message));
}

TEST(CNullTest, AHandleThatIsNullIsRefusedOrDescribesNothing) {
  std::uint64_t number = 1, other = 1;
  size_t count = 1;
  const size_t sizes[] = {0};
  const void* messages[] = {nullptr};
  tessera_tensor_info tensor{};
  tessera_chunk_info chunk{};
  tessera_object_info object{};
  tessera_bytes* bytes = nullptr;
  tessera_boxes boxes{};
  boxes.struct_size = sizeof boxes;
  const std::vector<std::function<tessera_status()>> calls = {
      [&] { return tessera_tensor(nullptr, 0, &tensor); },
      [&] { return tessera_find_tensor(nullptr, "w", &count); },
      [&] { return tessera_chunk(nullptr, 0, 0, &chunk); },
      [&] { return tessera_object(nullptr, 0, &object); },
      [&] { return tessera_read_object(nullptr, 0, &bytes); },
      [&] { return tessera_read_object_archive(nullptr, 0, &bytes); },
      [&] { return tessera_read(nullptr, &boxes, nullptr, nullptr); },
      [&] { return tessera_read_tensor(nullptr, "w", &number, 8, nullptr); },
      [&] { return tessera_diff(nullptr, nullptr, nullptr, &number, nullptr); },
      [&] { return tessera_convert(nullptr, "x", "dcp", nullptr, nullptr); },
      [&] { return tessera_reshard(nullptr, "x", 1, 0, nullptr, nullptr, nullptr); },
      [&] { return tessera_save_plan(nullptr, &bytes); },
      [&] { return tessera_save_answer(nullptr, 1, messages, sizes, &bytes); },
      [&] { return tessera_save_objects(nullptr, "x", 1, &count, &count); },
      [&] { return tessera_save_set_object(nullptr, 0, "x", 1); },
      [&] { return tessera_save_write(nullptr, "x", 1, &bytes); },
      [&] { return tessera_save_commit(nullptr, 1, messages, sizes, nullptr); }};
  for (const auto& call : calls) expect_invalid(call(), "is NULL, expected a pointer");
  EXPECT_STREQ(tessera_kind(nullptr), "");
  EXPECT_STREQ(tessera_format_version(nullptr), "");
  EXPECT_STREQ(tessera_bytes_data(nullptr), "");
  EXPECT_EQ(tessera_bytes_size(nullptr), 0u);
  EXPECT_EQ(tessera_warning_count(nullptr), 0u);
  EXPECT_EQ(tessera_warning(nullptr, 0), nullptr);
  EXPECT_EQ(tessera_file_count(nullptr), 0u);
  EXPECT_EQ(tessera_file_name(nullptr, 0), nullptr);
  EXPECT_EQ(tessera_largest_block(nullptr), 0u);
  EXPECT_EQ(tessera_tensor_count(nullptr), 0u);
  EXPECT_EQ(tessera_object_count(nullptr), 0u);
  EXPECT_EQ(tessera_save_written_bytes(nullptr), 0u);
  tessera_save_abandon(nullptr);
  tessera_task_cancel(nullptr);
  tessera_task_progress(nullptr, &number, &other);
  EXPECT_EQ(number, 0u);
  EXPECT_EQ(other, 0u);
  tessera_task_progress(nullptr, nullptr, nullptr);
}

TEST(CNullTest, AnOutputThatIsNullIsRefusedBeforeAnythingIsRead) {
  expect_invalid(tessera_verify("/nowhere/at-all", nullptr, nullptr, nullptr), "tessera_verify: problems is NULL");
  tessera_task* task = nullptr;
  ASSERT_EQ(tessera_task_new(&task), TESSERA_OK);
  tessera_task_cancel(task);
  tessera_diff_options options{};
  options.struct_size = sizeof options;
  options.task = task;
  tessera_checkpoint* checkpoint = nullptr;
  ASSERT_EQ(tessera_open(checkpoint_path().c_str(), nullptr, &checkpoint), TESSERA_OK) << tessera_last_error();
  expect_invalid(tessera_diff(checkpoint, checkpoint, &options, nullptr, nullptr), "tessera_diff: differences is NULL");
  tessera_close(checkpoint);
  tessera_task_free(task);
}

TEST(CEmptySelectionTest, IsRefused) {
  const testing::TemporaryDirectory directory;
  tessera_checkpoint* checkpoint = nullptr;
  ASSERT_EQ(tessera_open(checkpoint_path().c_str(), nullptr, &checkpoint), TESSERA_OK) << tessera_last_error();
  const char* const none[] = {nullptr};
  tessera_convert_options options{};
  options.struct_size = sizeof options;
  options.selection.select = none;
  const std::string path = directory / "x.pt";
  expect_invalid(tessera_convert(checkpoint, path.c_str(), "torch", &options, nullptr),
                 "tessera_convert: select is an empty list, expected globs, or NULL for all names");
  EXPECT_FALSE(std::filesystem::exists(path));
  tessera_diff_options diff{};
  diff.struct_size = sizeof diff;
  diff.selection.select = none;
  std::uint64_t differences = 0;
  expect_invalid(tessera_diff(checkpoint, checkpoint, &diff, &differences, nullptr),
                 "tessera_diff: select is an empty list");
  options.selection = {nullptr, none};  // which excludes nothing
  EXPECT_EQ(tessera_convert(checkpoint, path.c_str(), "torch", &options, nullptr), TESSERA_OK) << tessera_last_error();
  tessera_close(checkpoint);
}

TEST(CFileSystemErrorTest, IsAnErrorOfTheSystem) {
  const std::string name(300, 'a');
  tessera_checkpoint* checkpoint = nullptr;
  std::uint64_t problems = 0;
  EXPECT_EQ(tessera_open(name.c_str(), nullptr, &checkpoint), TESSERA_IO);
  EXPECT_EQ(tessera_verify(name.c_str(), nullptr, &problems, nullptr), TESSERA_IO);
  EXPECT_THAT(tessera_last_error(), ::testing::HasSubstr("File name too long"));
  const std::filesystem::filesystem_error error("status", "/closed/x",
                                                std::make_error_code(std::errc::permission_denied));
  EXPECT_EQ(keep_error(std::make_exception_ptr(error)), TESSERA_IO);
  EXPECT_THAT(tessera_last_error(), ::testing::HasSubstr("/closed/x"));
}

// A state of two chunks of one tensor.
class CStateTest : public ::testing::Test {
 protected:
  CStateTest() {
    state_.struct_size = sizeof state_;
    state_.count = 2;
    state_.names = names_;
    state_.dtypes = dtypes_;
    state_.dims = dims_;
    state_.shapes = shapes_;
    state_.offsets = offsets_;
    state_.sizes = sizes_;
    state_.data = data_;
    state_.data_bytes = bytes_;
  }
  ~CStateTest() override { tessera_save_free(save_); }
  tessera_status begin() { return tessera_save_new(path_.c_str(), &state_, nullptr, &save_); }

  const testing::TemporaryDirectory directory_;
  const std::string path_ = directory_ / "saved";
  const float values_[4] = {1, 2, 3, 4};
  const char* names_[2] = {"w", "w"};
  const char* dtypes_[2] = {"float32", "float32"};
  size_t dims_[2] = {1, 1};
  std::int64_t shapes_[2] = {4, 4}, offsets_[2] = {0, 2}, sizes_[2] = {2, 2};
  const void* data_[2] = {&values_[0], &values_[2]};
  size_t bytes_[2] = {8, 8};
  tessera_state state_{};
  tessera_save* save_ = nullptr;
};

TEST_F(CStateTest, RowsOfOneNameMustFitTogether) {
  dtypes_[1] = "int32";
  expect_invalid(begin(),
                 "'w' has dtype int32, shape [4] and requires_grad false, expected dtype float32, shape [4] and "
                 "requires_grad false as in an earlier row");
  dtypes_[1] = nullptr;
  dims_[1] = 0;
  expect_invalid(begin(), "'w' is a tensor in an earlier row, expected a name of its own for each object");
  dtypes_[0] = nullptr;
  dims_[0] = 0;
  expect_invalid(begin(), "'w' is an object in an earlier row, expected a name of its own for each object");
  dtypes_[1] = "float32";
  dims_[1] = 1;
  expect_invalid(begin(), "'w' is an object in an earlier row, expected a name of its own for each object");
}

TEST_F(CStateTest, AColumnOrAnElementThatIsNullIsNamed) {
  data_[1] = nullptr;
  expect_invalid(begin(), "tessera_save_new: data[1] is NULL, expected a pointer");
  names_[1] = nullptr;
  expect_invalid(begin(), "tessera_save_new: names[1] is NULL, expected a pointer");
  state_.shapes = nullptr;
  expect_invalid(begin(), "tessera_save_new: shapes is NULL, expected a pointer");
  state_.dims = nullptr;
  expect_invalid(begin(), "tessera_save_new: dims is NULL, expected a pointer");
}

TEST_F(CStateTest, AnIndexInAPathHas64Bits) {
  const char* paths[] = {R"(["w", 9223372036854775808])", nullptr};
  state_.paths = paths;
  expect_invalid(begin(), "expected strings and integers from -2^63 to 2^63 - 1");
}

TEST_F(CStateTest, CallsOutOfOrderNameTheCallThatIsMissing) {
  ASSERT_EQ(begin(), TESSERA_OK) << tessera_last_error();
  size_t rows[2] = {}, count = 0;
  tessera_bytes* bytes = nullptr;
  const void* const messages[] = {nullptr};
  const size_t sizes[] = {0};
  expect_invalid(tessera_save_objects(save_, "x", 1, rows, &count),
                 "tessera_save_objects: found no plan, expected a call of tessera_save_plan before");
  expect_invalid(tessera_save_write(save_, "x", 1, &bytes),
                 "tessera_save_write: found no plan, expected a call of tessera_save_plan before");
  expect_invalid(tessera_save_answer(save_, 0, messages, sizes, &bytes), "plans of 0 ranks, expected at least 1");
  for (const size_t ranks : {size_t{0}, size_t{1}}) {
    expect_invalid(tessera_save_commit(save_, ranks, messages, sizes, nullptr),
                   "tessera_save_commit: found no merged plans, expected a tessera_save_answer that succeeded before");
  }
  expect_invalid(tessera_save_set_object(save_, 0, "x", 1), "row 0 is the tensor 'w', expected an object");
  expect_invalid(tessera_save_set_object(save_, 2, "x", 1),
                 "row 2 of a state of 2 rows, expected the row of an object");
  EXPECT_FALSE(std::filesystem::exists(path_));
}

}  // namespace
}  // namespace tessera::c
