// The C interface, as a C program calls it.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "support/golden.h"
#include "support/temporary_directory.h"
#include "tessera/base/crc32.h"
#include "tessera/c/tessera.h"

namespace tessera::c {
namespace {

using nlohmann::json;
using testing::Golden;
using ::testing::HasSubstr;
using ::testing::StartsWith;
using testing::TemporaryDirectory;

using Opened = std::unique_ptr<tessera_checkpoint, void (*)(tessera_checkpoint*)>;
using Text = std::unique_ptr<tessera_bytes, void (*)(tessera_bytes*)>;

Opened open(const std::string& path) {
  tessera_checkpoint* checkpoint = nullptr;
  EXPECT_EQ(tessera_open(path.c_str(), nullptr, &checkpoint), TESSERA_OK) << tessera_last_error();
  return {checkpoint, tessera_close};
}

json json_of(tessera_bytes* text) {
  const Text owned(text, tessera_bytes_free);
  return json::parse(std::string(tessera_bytes_data(text), tessera_bytes_size(text)));
}

class CTest : public ::testing::TestWithParam<std::string> {
 protected:
  const Golden golden_ = testing::read_golden(GetParam());
};

TEST_P(CTest, EveryTensorOfPyTorchIsRead) {
  const Opened checkpoint = open(golden_.checkpoint);
  ASSERT_EQ(tessera_tensor_count(checkpoint.get()), golden_.tensors.size());
  EXPECT_STREQ(tessera_kind(checkpoint.get()), GetParam() == "2.14-hf"                        ? "safetensors"
                                               : GetParam().find("-tc-") != std::string::npos ? "torch_checkpointing"
                                                                                              : "dcp");
  for (size_t i = 0; i < golden_.tensors.size(); ++i) {
    tessera_tensor_info info{};
    ASSERT_EQ(tessera_tensor(checkpoint.get(), i, &info), TESSERA_OK);
    const auto& expected = golden_.tensors.at(std::string(info.name, info.name_bytes));
    EXPECT_EQ(info.dtype, expected.dtype);
    EXPECT_EQ(std::vector(info.shape, info.shape + info.dims), expected.shape);
    Bytes data(info.size_bytes);
    ASSERT_EQ(tessera_read_tensor(checkpoint.get(), info.name, data.data(), data.size(), nullptr), TESSERA_OK)
        << tessera_last_error();
    EXPECT_EQ(crc32(data), expected.crc32) << info.name;
  }
}

TEST_P(CTest, ChunksPartitionEachTensor) {
  const Opened checkpoint = open(golden_.checkpoint);
  for (size_t i = 0; i < tessera_tensor_count(checkpoint.get()); ++i) {
    tessera_tensor_info info{};
    ASSERT_EQ(tessera_tensor(checkpoint.get(), i, &info), TESSERA_OK);
    std::int64_t elements = 0, expected = 1;
    for (size_t c = 0; c < info.chunks; ++c) {
      tessera_chunk_info chunk{};
      ASSERT_EQ(tessera_chunk(checkpoint.get(), i, c, &chunk), TESSERA_OK);
      std::int64_t in_chunk = 1;
      for (size_t d = 0; d < info.dims; ++d) in_chunk *= chunk.sizes[d];
      elements += in_chunk;
      ASSERT_NE(tessera_file_name(checkpoint.get(), chunk.file), nullptr);
    }
    for (size_t d = 0; d < info.dims; ++d) expected *= info.shape[d];
    EXPECT_EQ(elements, expected) << info.name;
  }
}

TEST_P(CTest, ObjectsHaveTheirValues) {
  const Opened checkpoint = open(golden_.checkpoint);
  for (size_t i = 0; i < tessera_object_count(checkpoint.get()); ++i) {
    tessera_bytes* text = nullptr;
    ASSERT_EQ(tessera_read_object(checkpoint.get(), i, &text), TESSERA_OK) << tessera_last_error();
    const json object = json_of(text);
    tessera_object_info info{};
    ASSERT_EQ(tessera_object(checkpoint.get(), i, &info), TESSERA_OK);
    const auto expected = golden_.plain.find(std::string(info.name, info.name_bytes));
    if (expected != golden_.plain.end()) {
      EXPECT_EQ(object.at("repr"), expected->second);
    }
    EXPECT_EQ(object.at("value").is_null() && object.at("type") != "NoneType", object.contains("opaque"));
  }
}

TEST_P(CTest, VerifyConvertReshardAndDiffAgree) {
  const TemporaryDirectory directory;
  const std::string path = golden_.checkpoint, converted = directory.path() / "converted.pt",
                    resharded = directory.path() / "resharded";
  std::uint64_t count = 99;
  tessera_bytes* text = nullptr;
  ASSERT_EQ(tessera_verify(path.c_str(), nullptr, &count, &text), TESSERA_OK) << tessera_last_error();
  EXPECT_EQ(count, 0u);
  EXPECT_EQ(json_of(text).at("tensors"), golden_.tensors.size());
  const Opened source = open(path);
  ASSERT_EQ(tessera_convert(source.get(), converted.c_str(), "torch", nullptr, &text), TESSERA_OK)
      << tessera_last_error();
  EXPECT_EQ(json_of(text).at("tensors"), golden_.tensors.size());
  ASSERT_EQ(tessera_reshard(source.get(), resharded.c_str(), 3, 0, nullptr, nullptr, nullptr), TESSERA_OK)
      << tessera_last_error();
  for (const std::string& other : {converted, resharded}) {
    count = 99;
    ASSERT_EQ(tessera_diff(source.get(), open(other).get(), nullptr, &count, &text), TESSERA_OK)
        << tessera_last_error();
    EXPECT_EQ(json_of(text).at("same"), true);
    EXPECT_EQ(count, 0u);
  }
}

INSTANTIATE_TEST_SUITE_P(Checkpoints, CTest, ::testing::ValuesIn(testing::golden_names()),
                         [](const auto& test) { return testing::test_name(test.param); });

const std::string kName = "model.layers.0.bias";  // int32, 3 x 13

class CReadTest : public ::testing::Test {
 protected:
  CReadTest() : full_(39) {
    EXPECT_EQ(tessera_read_tensor(checkpoint_.get(), kName.c_str(), full_.data(), 39 * 4, nullptr), TESSERA_OK);
    boxes_.struct_size = sizeof boxes_;
    boxes_.count = 2;
    boxes_.names = names_;
    boxes_.dims = dims_;
    boxes_.offsets = offsets_;
    boxes_.sizes = sizes_;
    boxes_.data = data_;
    boxes_.data_bytes = bytes_;
  }
  tessera_status read() { return tessera_read(checkpoint_.get(), &boxes_, nullptr, nullptr); }

  const Opened checkpoint_ = open(testing::read_golden("2.6-sharded").checkpoint);
  std::vector<std::int32_t> full_, first_ = std::vector<std::int32_t>(4), second_ = std::vector<std::int32_t>(13);
  const char* names_[2] = {kName.c_str(), kName.c_str()};
  size_t dims_[2] = {2, 2};
  std::int64_t offsets_[4] = {1, 5, 0, 12}, sizes_[4] = {2, 2, 3, 1};
  void* data_[2] = {first_.data(), second_.data()};
  size_t bytes_[2] = {16, 52};
  tessera_boxes boxes_{};
};

TEST_F(CReadTest, BoxesGoToRowMajorAndToStridedMemory) {
  tessera_read_report report{};
  ASSERT_EQ(tessera_read(checkpoint_.get(), &boxes_, nullptr, &report), TESSERA_OK) << tessera_last_error();
  EXPECT_EQ(first_, (std::vector{full_[18], full_[19], full_[31], full_[32]}));
  EXPECT_EQ(std::vector(second_.begin(), second_.begin() + 3), (std::vector{full_[12], full_[25], full_[38]}));
  EXPECT_GE(report.read_bytes, 28u);
  const std::int64_t strides[] = {1, 2, 5, 1};  // column-major, and rows that are five elements apart
  boxes_.strides = strides;
  second_.assign(13, 0);
  ASSERT_EQ(read(), TESSERA_OK) << tessera_last_error();
  EXPECT_EQ(first_, (std::vector{full_[18], full_[31], full_[19], full_[32]}));
  EXPECT_EQ(second_, (std::vector{full_[12], 0, 0, 0, 0, full_[25], 0, 0, 0, 0, full_[38], 0, 0}));
}

TEST_F(CReadTest, WithoutBoxesItReadsFullTensors) {
  boxes_.count = 1;
  boxes_.dims = nullptr;
  boxes_.offsets = boxes_.sizes = nullptr;
  std::vector<std::int32_t> all(39);
  data_[0] = all.data();
  bytes_[0] = 39 * 4;
  ASSERT_EQ(read(), TESSERA_OK) << tessera_last_error();
  EXPECT_EQ(all, full_);
}

TEST_F(CReadTest, WrongArgumentsAreNamedAndNothingIsRead) {
  const auto expect = [&](tessera_status status, const char* message) {
    EXPECT_EQ(read(), status);
    EXPECT_THAT(tessera_last_error(), HasSubstr(message));
    EXPECT_EQ(first_, std::vector<std::int32_t>(4));
  };
  bytes_[1] = 11;
  expect(TESSERA_INVALID_ARGUMENT,
         "box 1, of tensor 'model.layers.0.bias', has memory of 11 bytes, expected at least 12");
  bytes_[1] = 52;
  sizes_[0] = 3;
  expect(TESSERA_INVALID_ARGUMENT, "box 0, of tensor 'model.layers.0.bias', is [1, 4)x[5, 7), expected a box within");
  sizes_[0] = 2;
  dims_[1] = 3;
  expect(TESSERA_INVALID_ARGUMENT, "box 1, of tensor 'model.layers.0.bias', has 3 dimensions, expected 2");
  dims_[1] = 2;
  const std::int64_t shapes[] = {3, 13, 13, 3};
  boxes_.shapes = shapes;
  expect(TESSERA_INVALID_ARGUMENT, "box 1, of tensor 'model.layers.0.bias', has shape [3, 13], expected [13, 3]");
  boxes_.dims = nullptr;
  boxes_.offsets = boxes_.sizes = nullptr;
  expect(TESSERA_INVALID_ARGUMENT, "shapes are passed without dims, expected both");
  boxes_.dims = dims_;
  boxes_.offsets = offsets_;
  boxes_.sizes = sizes_;
  boxes_.shapes = nullptr;
  const std::int64_t strides[] = {1, 2, -1, 1};
  boxes_.strides = strides;
  expect(TESSERA_INVALID_ARGUMENT, "has strides [-1, 1], expected none below 0");
  const std::int64_t huge[] = {1, 2, INT64_MAX / 2, 1};
  boxes_.strides = huge;
  EXPECT_NE(read(), TESSERA_OK);
  EXPECT_THAT(tessera_last_error(), HasSubstr("overflows"));
  boxes_.strides = nullptr;
  const char* dtypes[] = {"int32", "intt"};
  boxes_.dtypes = dtypes;
  expect(TESSERA_INVALID_ARGUMENT, "has memory of dtype 'intt', expected one of PyTorch");
  dtypes[1] = "float32";
  expect(TESSERA_INVALID_ARGUMENT, "has dtype int32, expected float32");
  boxes_.dtypes = nullptr;
  boxes_.sizes = nullptr;
  expect(TESSERA_INVALID_ARGUMENT, "one of dims, offsets and sizes is NULL, expected all of them or none");
  boxes_.sizes = sizes_;
  names_[1] = "nope";
  expect(TESSERA_NOT_FOUND, "there is no tensor 'nope', expected the name of one; it has ");
  names_[1] = nullptr;
  expect(TESSERA_INVALID_ARGUMENT, "tessera_read: names[1] is NULL, expected a pointer");
  names_[1] = kName.c_str();
  data_[0] = nullptr;
  expect(TESSERA_INVALID_ARGUMENT, "tessera_read: data[0] is NULL, expected a pointer");
}

TEST_F(CReadTest, FloatingPointElementsAreCastIfAsked) {
  const std::string name = "model.layers.13.scale";  // bfloat16, 5 x 8
  std::vector<float> values(40);
  const char* const names[] = {name.c_str()};
  const char* const dtypes[] = {"float32"};
  void* const data[] = {values.data()};
  const size_t bytes[] = {160};
  tessera_boxes boxes{};
  boxes.struct_size = sizeof boxes;
  boxes.count = 1;
  boxes.names = names;
  boxes.dtypes = dtypes;
  boxes.data = data;
  boxes.data_bytes = bytes;
  EXPECT_EQ(tessera_read(checkpoint_.get(), &boxes, nullptr, nullptr), TESSERA_INVALID_ARGUMENT);
  tessera_read_options options{sizeof options, 1, 0, 0, nullptr, 0};
  ASSERT_EQ(tessera_read(checkpoint_.get(), &boxes, &options, nullptr), TESSERA_OK) << tessera_last_error();
  std::vector<std::uint16_t> stored(40);
  ASSERT_EQ(tessera_read_tensor(checkpoint_.get(), name.c_str(), stored.data(), 80, nullptr), TESSERA_OK);
  for (std::size_t i = 0; i < 40; ++i)
    EXPECT_EQ(std::bit_cast<std::uint32_t>(values[i]), std::uint32_t{stored[i]} << 16);
}

TEST(CErrorTest, AreAStatusAndAMessageOfTheThread) {
  tessera_checkpoint* checkpoint = nullptr;
  EXPECT_EQ(tessera_open("/nowhere/at-all", nullptr, &checkpoint), TESSERA_NOT_FOUND);
  EXPECT_EQ(checkpoint, nullptr);
  EXPECT_THAT(tessera_last_error(), HasSubstr("/nowhere/at-all"));
  std::thread([] { EXPECT_STREQ(tessera_last_error(), ""); }).join();
  EXPECT_THAT(tessera_last_error(), HasSubstr("/nowhere/at-all"));
  EXPECT_EQ(tessera_open(nullptr, nullptr, &checkpoint), TESSERA_INVALID_ARGUMENT);
  EXPECT_STREQ(tessera_last_error(), "tessera_open: path is NULL, expected a pointer");
  EXPECT_EQ(tessera_open("x", nullptr, nullptr), TESSERA_INVALID_ARGUMENT);
  EXPECT_STREQ(tessera_status_name(TESSERA_CORRUPT), "corrupt");
  EXPECT_STREQ(tessera_status_name(static_cast<tessera_status>(15)), "unknown");
  tessera_close(nullptr);
  tessera_bytes_free(nullptr);
  tessera_task_free(nullptr);
}

TEST(COptionsTest, OlderAndNewerCallersAreUnderstood) {
  const std::string path = testing::read_golden("2.6-sharded").checkpoint;
  struct Newer {
    tessera_open_options known;
    int of_the_future[2];
  } newer{{sizeof(Newer), 0}, {0, 0}};
  tessera_checkpoint* checkpoint = nullptr;
  EXPECT_EQ(tessera_open(path.c_str(), &newer.known, &checkpoint), TESSERA_OK) << tessera_last_error();
  tessera_close(checkpoint);
  newer.of_the_future[1] = 1;
  EXPECT_EQ(tessera_open(path.c_str(), &newer.known, &checkpoint), TESSERA_UNSUPPORTED);
  EXPECT_THAT(tessera_last_error(), HasSubstr("set a member that this library does not know"));
  tessera_open_options older{sizeof(size_t), 1};  // knows of no member
  EXPECT_EQ(tessera_open(path.c_str(), &older, &checkpoint), TESSERA_OK);
  tessera_close(checkpoint);
  older.struct_size = 0;
  EXPECT_EQ(tessera_open(path.c_str(), &older, &checkpoint), TESSERA_INVALID_ARGUMENT);
  EXPECT_THAT(tessera_last_error(), HasSubstr("struct_size of the options is 0"));
}

TEST(CTaskTest, ACancelledTaskEndsEveryOperationAndLeavesNothing) {
  const TemporaryDirectory directory;
  const Opened checkpoint = open(testing::read_golden("2.6-sharded").checkpoint);
  tessera_task* task = nullptr;
  ASSERT_EQ(tessera_task_new(&task), TESSERA_OK);
  tessera_convert_options options{};
  options.struct_size = sizeof options;
  options.task = task;
  const std::string first = directory.path() / "a.safetensors", second = directory.path() / "b.safetensors";
  ASSERT_EQ(tessera_convert(checkpoint.get(), first.c_str(), "safetensors", &options, nullptr), TESSERA_OK)
      << tessera_last_error();
  std::uint64_t done = 0, total = 0;
  tessera_task_progress(task, &done, &total);
  EXPECT_GT(total, 0u);
  EXPECT_EQ(done, total);
  const auto files = [&] { return std::distance(std::filesystem::directory_iterator(directory.path()), {}); };
  const auto before = files();
  tessera_task_cancel(task);
  EXPECT_EQ(tessera_convert(checkpoint.get(), second.c_str(), "safetensors", &options, nullptr), TESSERA_CANCELLED);
  EXPECT_EQ(files(), before);
  tessera_task_free(task);
}

TEST(CSelectionTest, ChoosesNamesAndRefusesThoseThatMatchNothing) {
  const TemporaryDirectory directory;
  const Opened checkpoint = open(testing::read_golden("2.6-sharded").checkpoint);
  const char* select[] = {"model.layers.?.*", nullptr};
  const char* exclude[] = {"*.weight", nullptr};
  tessera_convert_options options{};
  options.struct_size = sizeof options;
  options.selection = {select, exclude};
  options.dry_run = 1;
  tessera_bytes* text = nullptr;
  const std::string path = directory.path() / "x.pt";
  ASSERT_EQ(tessera_convert(checkpoint.get(), path.c_str(), "torch", &options, &text), TESSERA_OK)
      << tessera_last_error();
  EXPECT_LT(json_of(text).at("tensors"), tessera_tensor_count(checkpoint.get()));
  EXPECT_FALSE(std::filesystem::exists(path));
  select[0] = "modle.*";
  EXPECT_EQ(tessera_convert(checkpoint.get(), path.c_str(), "torch", &options, &text), TESSERA_INVALID_ARGUMENT);
  EXPECT_THAT(tessera_last_error(), HasSubstr("no name matches 'modle.*'"));
  options.selection = {};
  options.dtype = "bf17";
  EXPECT_EQ(tessera_convert(checkpoint.get(), path.c_str(), "torch", &options, &text), TESSERA_INVALID_ARGUMENT);
  options.dtype = nullptr;
  EXPECT_EQ(tessera_convert(checkpoint.get(), path.c_str(), "gguf", &options, &text), TESSERA_INVALID_ARGUMENT);
  EXPECT_THAT(tessera_last_error(),
              HasSubstr("the format is 'gguf', expected dcp, safetensors, torch or torch_checkpointing"));
  EXPECT_EQ(tessera_reshard(checkpoint.get(), path.c_str(), 0, 0, nullptr, nullptr, nullptr), TESSERA_INVALID_ARGUMENT);
}

TEST(CListTest, NumbersBeyondTheEndAreRefused) {
  const Opened checkpoint = open(testing::read_golden("2.6-sharded").checkpoint);
  tessera_tensor_info info{};
  tessera_chunk_info chunk{};
  tessera_bytes* text = nullptr;
  EXPECT_EQ(tessera_tensor(checkpoint.get(), 1000, &info), TESSERA_INVALID_ARGUMENT);
  EXPECT_THAT(tessera_last_error(), HasSubstr("there is no tensor 1000 in"));
  EXPECT_EQ(tessera_chunk(checkpoint.get(), 0, 1000, &chunk), TESSERA_INVALID_ARGUMENT);
  EXPECT_THAT(tessera_last_error(), HasSubstr("has no chunk 1000, expected a number below"));
  EXPECT_EQ(tessera_read_object(checkpoint.get(), 1000, &text), TESSERA_INVALID_ARGUMENT);
  tessera_object_info object{};
  EXPECT_EQ(tessera_object(checkpoint.get(), 1000, &object), TESSERA_INVALID_ARGUMENT);
  EXPECT_THAT(tessera_last_error(), HasSubstr("there is no object 1000 in"));
  EXPECT_EQ(tessera_file_name(checkpoint.get(), 1000), nullptr);
  EXPECT_EQ(tessera_warning(checkpoint.get(), 1000), nullptr);
  size_t tensor = 0;
  EXPECT_EQ(tessera_find_tensor(checkpoint.get(), "nope", &tensor), TESSERA_NOT_FOUND);
}

// Two ranks in one process: each has half of a tensor, and both have an object.
class CSaveTest : public ::testing::Test {
 protected:
  static constexpr int kRanks = 2;
  using Save = std::unique_ptr<tessera_save, void (*)(tessera_save*)>;

  Save begin(int rank, const tessera_save_options* options = nullptr) {
    const char* const names[] = {"w", "step"};
    const char* const dtypes[] = {"float32", nullptr};
    const size_t dims[] = {1, 0};
    const std::int64_t shape = 4, offset = 2 * rank, size = 2;
    const void* const data[] = {read_ == nullptr ? &values_[2 * rank] : nullptr, nullptr};
    const size_t bytes[] = {read_ == nullptr ? 8u : 0u, 0};
    tessera_state state{};
    state.struct_size = sizeof state;
    state.count = 2;
    state.names = names;
    state.dtypes = dtypes;
    state.dims = dims;
    state.shapes = &shape;
    state.offsets = &offset;
    state.sizes = &size;
    state.data = data;
    state.data_bytes = bytes;
    state.read = read_;
    state.context = const_cast<float*>(&values_[2 * rank]);
    tessera_save* save = nullptr;
    EXPECT_EQ(tessera_save_new(path_.c_str(), &state, options, &save), TESSERA_OK) << tessera_last_error();
    return {save, tessera_save_free};
  }

  // What a step of each rank returned, for the next step.
  struct Messages {
    explicit Messages(std::vector<tessera_bytes*> made) {
      for (tessera_bytes* bytes : made) owned.emplace_back(bytes, tessera_bytes_free);
      for (const Text& text : owned) {
        data.push_back(tessera_bytes_data(text.get()));
        sizes.push_back(tessera_bytes_size(text.get()));
      }
    }
    std::vector<Text> owned;
    std::vector<const void*> data;
    std::vector<size_t> sizes;
  };

  Messages answers_to(const std::vector<Save>& saves) {
    std::vector<tessera_bytes*> plans(kRanks), answers(kRanks);
    for (int r = 0; r < kRanks; ++r) {
      EXPECT_EQ(tessera_save_plan(saves[r].get(), &plans[r]), TESSERA_OK) << tessera_last_error();
    }
    const Messages sent(plans);
    EXPECT_EQ(tessera_save_answer(saves[0].get(), kRanks, sent.data.data(), sent.sizes.data(), answers.data()),
              TESSERA_OK)
        << tessera_last_error();
    return Messages(answers);
  }

  // Writes both ranks' files. The rank that must write the object gets `archive`.
  Messages write(const std::vector<Save>& saves, const Messages& answers, const std::string& archive) {
    std::vector<tessera_bytes*> reports(kRanks);
    size_t objects = 0;
    for (int r = 0; r < kRanks; ++r) {
      size_t rows[2], count = 0;
      EXPECT_EQ(tessera_save_objects(saves[r].get(), answers.data[r], answers.sizes[r], rows, &count), TESSERA_OK);
      objects += count;
      for (size_t i = 0; i < count; ++i) {
        EXPECT_EQ(rows[i], 1u);
        EXPECT_EQ(tessera_save_set_object(saves[r].get(), 1, archive.data(), archive.size()), TESSERA_OK);
      }
      EXPECT_EQ(tessera_save_write(saves[r].get(), answers.data[r], answers.sizes[r], &reports[r]), TESSERA_OK)
          << tessera_last_error();
    }
    EXPECT_EQ(objects, 1u);
    return Messages(reports);
  }

  // The archive of an object that PyTorch wrote.
  static std::string archive() {
    const Opened golden = open(testing::read_golden("2.14-optim").checkpoint);
    tessera_bytes* bytes = nullptr;
    EXPECT_EQ(tessera_read_object_archive(golden.get(), 0, &bytes), TESSERA_OK) << tessera_last_error();
    const Text owned(bytes, tessera_bytes_free);
    return {tessera_bytes_data(bytes), tessera_bytes_size(bytes)};
  }

  std::ptrdiff_t files() const { return std::distance(std::filesystem::directory_iterator(path_), {}); }

  const TemporaryDirectory directory_;
  const std::string path_ = directory_.path() / "saved";
  const std::vector<float> values_ = {1, 2, 3, 4};
  tessera_read_elements read_ = nullptr;  // if set, no elements are passed as memory
};

TEST_F(CSaveTest, WhatTwoRanksSaveIsRead) {
  std::vector<Save> saves;
  for (int r = 0; r < kRanks; ++r) saves.push_back(begin(r));
  const Messages answers = answers_to(saves), reports = write(saves, answers, archive());
  ASSERT_EQ(tessera_save_commit(saves[0].get(), kRanks, reports.data.data(), reports.sizes.data(), nullptr), TESSERA_OK)
      << tessera_last_error();
  tessera_save_abandon(saves[0].get());  // too late: the files belong to the checkpoint
  std::uint64_t problems = 1;
  ASSERT_EQ(tessera_verify(path_.c_str(), nullptr, &problems, nullptr), TESSERA_OK) << tessera_last_error();
  EXPECT_EQ(problems, 0u);
  const Opened saved = open(path_);
  std::vector<float> found(4);
  ASSERT_EQ(tessera_read_tensor(saved.get(), "w", found.data(), 16, nullptr), TESSERA_OK) << tessera_last_error();
  EXPECT_EQ(found, values_);
  EXPECT_EQ(tessera_object_count(saved.get()), 1u);

  tessera_save_options options{};
  options.struct_size = sizeof options;
  options.keep = 1;
  std::vector<Save> again;
  std::vector<tessera_bytes*> plans(kRanks), refused(kRanks);
  for (int r = 0; r < kRanks; ++r) {
    again.push_back(begin(r, &options));
    ASSERT_EQ(tessera_save_plan(again[r].get(), &plans[r]), TESSERA_OK);
  }
  const Messages sent(plans);
  EXPECT_EQ(tessera_save_answer(again[0].get(), kRanks, sent.data.data(), sent.sizes.data(), refused.data()),
            TESSERA_INVALID_ARGUMENT);
  EXPECT_THAT(tessera_last_error(), HasSubstr("found a checkpoint, expected none"));
}

TEST_F(CSaveTest, AnAbandonedSaveLeavesNothingAndMistakesAreNamed) {
  std::vector<Save> saves;
  for (int r = 0; r < kRanks; ++r) saves.push_back(begin(r));
  const Messages answers = answers_to(saves);
  tessera_bytes* report = nullptr;
  int missing = 0;
  for (int r = 0; r < kRanks; ++r) {
    if (tessera_save_write(saves[r].get(), answers.data[r], answers.sizes[r], &report) == TESSERA_OK) {
      tessera_bytes_free(report);
    } else {
      EXPECT_THAT(tessera_last_error(), HasSubstr("'step' was not passed, expected tessera_save_set_object"));
      ++missing;
    }
  }
  EXPECT_EQ(missing, 1);
  EXPECT_EQ(tessera_save_set_object(saves[0].get(), 0, "x", 1), TESSERA_INVALID_ARGUMENT);
  EXPECT_EQ(tessera_save_write(saves[0].get(), "x", 1, &report), TESSERA_CORRUPT);
  for (const Save& save : saves) tessera_save_abandon(save.get());
  EXPECT_EQ(files(), 0);
}

TEST_F(CSaveTest, ObjectsArePassedBySeveralThreads) {
  constexpr size_t kObjects = 64, kThreads = 8;
  std::vector<std::string> texts(kObjects);
  std::vector<const char*> names(kObjects), dtypes(kObjects);
  for (size_t i = 0; i < kObjects; ++i) names[i] = (texts[i] = std::to_string(i)).c_str();
  const std::vector<size_t> zeros(kObjects);
  const std::vector<const void*> data(kObjects);
  tessera_state state{};
  state.struct_size = sizeof state;
  state.count = kObjects;
  state.names = names.data();
  state.dtypes = dtypes.data();
  state.dims = state.data_bytes = zeros.data();
  state.data = data.data();
  tessera_save* save = nullptr;
  ASSERT_EQ(tessera_save_new(path_.c_str(), &state, nullptr, &save), TESSERA_OK) << tessera_last_error();
  const Save owned(save, tessera_save_free);
  tessera_bytes *plan = nullptr, *answer = nullptr, *report = nullptr;
  ASSERT_EQ(tessera_save_plan(save, &plan), TESSERA_OK);
  const Messages plans({plan});
  ASSERT_EQ(tessera_save_answer(save, 1, plans.data.data(), plans.sizes.data(), &answer), TESSERA_OK);
  const Messages answers({answer});
  const std::string object = archive();
  std::vector<std::thread> threads;
  for (size_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (size_t row = t; row < kObjects; row += kThreads) {
        EXPECT_EQ(tessera_save_set_object(save, row, object.data(), object.size()), TESSERA_OK);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::thread observer([&] { tessera_save_written_bytes(save); });
  EXPECT_EQ(tessera_save_write(save, answers.data[0], answers.sizes[0], &report), TESSERA_OK) << tessera_last_error();
  observer.join();
  EXPECT_GE(tessera_save_written_bytes(save), kObjects * object.size());
  tessera_bytes_free(report);
}

TEST_F(CSaveTest, ElementsThatAreElsewhereAreReadByAFunction) {
  read_ = [](void* context, size_t row, std::uint64_t begin_bytes, size_t size_bytes, void* out) {
    std::memcpy(out, static_cast<const char*>(context) + begin_bytes, size_bytes);
    return static_cast<int>(row);  // 0
  };
  std::vector<Save> saves;
  for (int r = 0; r < kRanks; ++r) saves.push_back(begin(r));
  const Messages answers = answers_to(saves), reports = write(saves, answers, archive());
  ASSERT_EQ(tessera_save_commit(saves[0].get(), kRanks, reports.data.data(), reports.sizes.data(), nullptr), TESSERA_OK)
      << tessera_last_error();
  const Opened saved = open(path_);
  std::vector<float> found(4);
  ASSERT_EQ(tessera_read_tensor(saved.get(), "w", found.data(), 16, nullptr), TESSERA_OK) << tessera_last_error();
  EXPECT_EQ(found, values_);
}

TEST_F(CSaveTest, AFunctionThatCannotReadElementsFailsTheSave) {
  read_ = [](void*, size_t, std::uint64_t, size_t, void*) { return 5; };
  std::vector<Save> saves;
  for (int r = 0; r < kRanks; ++r) saves.push_back(begin(r));
  const Messages answers = answers_to(saves);
  const std::string object = archive();
  for (int r = 0; r < kRanks; ++r) {
    tessera_bytes* report = nullptr;
    EXPECT_EQ(tessera_save_set_object(saves[r].get(), 1, object.data(), object.size()), TESSERA_OK);
    EXPECT_EQ(tessera_save_write(saves[r].get(), answers.data[r], answers.sizes[r], &report), TESSERA_IO);
    EXPECT_THAT(tessera_last_error(), HasSubstr("the caller's function that reads 'w' returned 5, expected 0"));
    tessera_save_abandon(saves[r].get());
  }
  EXPECT_EQ(files(), 0);
}

}  // namespace
}  // namespace tessera::c
