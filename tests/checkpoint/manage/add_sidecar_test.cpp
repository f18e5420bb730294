#include "tessera/checkpoint/manage/add_sidecar.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <utility>

#include "checkpoint/manage/runs.h"
#include "checkpoint/save/saved_states.h"
#include "support/error_matchers.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/faulty_storage.h"
#include "tessera/checkpoint/save.h"
#include "tessera/checkpoint/sidecar.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

class AddSidecarTest : public runs::RunTest {
 protected:
  // Expects that the sidecar has the facts of the files as they are.
  void expect_facts(const fs::path& checkpoint, std::size_t files) const {
    const auto sidecar = read_sidecar(checkpoint);
    ASSERT_TRUE(sidecar);
    EXPECT_EQ(sidecar->files.size(), files);
    const fs::path directory = fs::is_directory(checkpoint) ? checkpoint : checkpoint.parent_path();
    for (const auto& [name, facts] : sidecar->files) EXPECT_EQ(facts, facts_of(read_file(directory / name))) << name;
    const VerifyReport report = verify(checkpoint);
    EXPECT_TRUE(report.good());
    EXPECT_TRUE(report.sidecar_agrees);
    EXPECT_EQ(report.bytes_without_checksum, 0u);
    EXPECT_FALSE(fs::exists(report_path(checkpoint)));
  }
  static fs::path report_path(const fs::path& checkpoint) { return sidecar_path(checkpoint).string() + ".tmp"; }
};

TEST_F(AddSidecarTest, EveryFormatGetsOneThatVerifyAgreesWith) {
  add_dcp("dcp");
  fs::remove(run() / "dcp/.tessera.json");
  fs::copy(runs::golden_safetensors_file(), run() / "model.safetensors");
  add_torch("model.pt");
  fs::copy(runs::golden_checkpoint("2.14-hf"), run() / "hf", fs::copy_options::recursive);
  const auto add = [&](const char* name) {
    const AddSidecarReport report = add_sidecar(run() / name);
    EXPECT_TRUE(report.written) << name;
    EXPECT_FALSE(report.replaced) << name;
    EXPECT_GT(report.bytes, 0u);
    return report.files;
  };
  EXPECT_EQ(add("dcp"), 5u);
  expect_facts(run() / "dcp", 5);
  EXPECT_EQ(add("model.safetensors"), 1u);
  expect_facts(run() / "model.safetensors", 1);
  EXPECT_EQ(add("model.pt"), 1u);
  expect_facts(run() / "model.pt", 1);
  expect_facts(run() / "hf", add("hf"));
}

TEST_F(AddSidecarTest, FilesOfManyBlocksAreSummedByThreadsAsInOnePiece) {
  const std::uint64_t bytes = 40 * Sidecar::kBlockBytes + 17;
  std::string header = R"({"a":{"dtype":"U8","shape":[)" + std::to_string(bytes) + R"(],"data_offsets":[0,)" +
                       std::to_string(bytes) + "]}}";
  header.append(8 - header.size() % 8, ' ');
  Bytes file;
  append_little_endian(file, std::uint64_t{header.size()});
  append(file, header);
  for (std::uint64_t i = 0; i < bytes; ++i) file.push_back(static_cast<std::uint8_t>(i * i >> 9));
  write_new_file(run() / "a.safetensors", file);
  AddSidecarOptions options;
  options.jobs = 4;
  add_sidecar(run() / "a.safetensors", options);
  expect_facts(run() / "a.safetensors", 1);
}

TEST_F(AddSidecarTest, OneThatAgreesIsNotWrittenAgain) {
  fs::copy(runs::golden_safetensors_file(), run() / "a.safetensors");
  add_sidecar(run() / "a.safetensors");
  const auto written = fs::last_write_time(sidecar_path(run() / "a.safetensors"));
  const AddSidecarReport report = add_sidecar(run() / "a.safetensors");
  EXPECT_FALSE(report.written);
  EXPECT_TRUE(report.verified.good());
  EXPECT_EQ(report.files, 1u);
  EXPECT_EQ(fs::last_write_time(sidecar_path(run() / "a.safetensors")), written);
}

TEST_F(AddSidecarTest, OneThatDisagreesIsReplacedByForceOnly) {
  fs::copy(runs::golden_safetensors_file(), run() / "a.safetensors");
  add_sidecar(run() / "a.safetensors");
  const Bytes before = read_file(sidecar_path(run() / "a.safetensors"));
  testing::put_byte(run() / "a.safetensors", static_cast<std::int64_t>(fs::file_size(run() / "a.safetensors") - 1),
                    0x55);
  const AddSidecarReport refused = add_sidecar(run() / "a.safetensors");
  EXPECT_FALSE(refused.written);
  ASSERT_EQ(refused.verified.problem_count, 1u);
  EXPECT_THAT(refused.verified.problems[0].what, HasSubstr("expected"));
  EXPECT_EQ(read_file(sidecar_path(run() / "a.safetensors")), before);
  AddSidecarOptions force;
  force.force = true;
  const AddSidecarReport replaced = add_sidecar(run() / "a.safetensors", force);
  EXPECT_TRUE(replaced.written);
  EXPECT_TRUE(replaced.replaced);
  expect_facts(run() / "a.safetensors", 1);
}

TEST_F(AddSidecarTest, DamageThatTheFormatShowsIsNotBlessed) {
  add_dcp("dcp");
  fs::remove(run() / "dcp/.tessera.json");
  testing::put_byte(run() / "dcp/__0_0.distcp", 5000, 0x55);
  const AddSidecarReport refused = add_sidecar(run() / "dcp");
  EXPECT_FALSE(refused.written);
  EXPECT_FALSE(refused.verified.good());
  EXPECT_FALSE(fs::exists(run() / "dcp/.tessera.json"));
}

TEST_F(AddSidecarTest, TheIndicesOfADirectoryShareItsSidecar) {
  const fs::path directory = run() / "hf", index = directory / "model.safetensors.index.json";
  fs::copy(fs::path(testing::source_dir()) / "tests/golden/quantized/model", directory);
  const AddSidecarReport first = add_sidecar(index);
  EXPECT_EQ(first.sidecar, directory / ".tessera.json");
  EXPECT_TRUE(first.written);
  for (const fs::path& path : {index, directory}) EXPECT_TRUE(verify(path).sidecar_agrees) << path;

  const fs::path other = directory / "pytorch_model.bin.index.json";
  add_torch("hf/pytorch_model.bin");
  add_text("hf/pytorch_model.bin.index.json", R"({"weight_map": {"weight": "pytorch_model.bin"}})");
  AddSidecarOptions force;
  force.force = true;  // the sidecar does not list its files
  EXPECT_EQ(add_sidecar(other, force).files, first.files + 2);
  for (const fs::path& path : {index, directory, other}) {
    EXPECT_TRUE(verify(path).good()) << path;
    EXPECT_TRUE(verify(path).sidecar_agrees) << path;
  }
}

TEST_F(AddSidecarTest, WhatAKilledCallLeftIsReplaced) {
  fs::copy(runs::golden_safetensors_file(), run() / "a.safetensors");
  add_text("a.safetensors.tessera.json.tmp", "{");
  EXPECT_TRUE(add_sidecar(run() / "a.safetensors").written);
  expect_facts(run() / "a.safetensors", 1);
}

TEST_F(AddSidecarTest, WhatAKilledSaveLeftIsReplaced) {
  add_dcp("dcp");
  fs::remove(run() / "dcp/.tessera.json");
  for (const char* left : {"", "{"}) {
    add_text("dcp/.tessera.json.tmp", left);
    EXPECT_TRUE(add_sidecar(run() / "dcp").written);
    expect_facts(run() / "dcp", 5);
    fs::remove(run() / "dcp/.tessera.json");
  }
}

// Calls a function when the files have been read.
class AtTheEnd final : public ProgressSink {
 public:
  explicit AtTheEnd(std::function<void()> call) : call_(std::move(call)) {}
  void begin(std::string_view phase, std::uint64_t) override { is_sum_ = phase == "sum"; }
  void advance(std::uint64_t) override {}
  void end() override {
    if (is_sum_) call_();
  }

 private:
  std::function<void()> call_;
  bool is_sum_ = false;
};

TEST_F(AddSidecarTest, DuringACommitNothingIsReplaced) {
  add_dcp("dcp");
  fs::remove(run() / "dcp/.tessera.json");
  AtTheEnd commit([&] { add_text("dcp/.tessera.json.tmp", "of a save"); });
  AddSidecarOptions options;
  options.progress = &commit;
  EXPECT_ERROR(add_sidecar(run() / "dcp", options), ErrorCode::invalid_argument,
               "found .tessera.json.tmp, expected none: another save is being committed");
  EXPECT_EQ(as_text(read_file(run() / "dcp/.tessera.json.tmp")), "of a save");
  EXPECT_FALSE(fs::exists(run() / "dcp/.tessera.json"));
}

FlatState state_to_save() {
  const saved::Shape shape = {6, 4};
  return {saved::tensor_entry("a", shape, {Box::full(shape)})};
}

// The save replaces a checkpoint without a sidecar.
TEST_F(AddSidecarTest, ASaveThatIsRunningIsCommitted) {
  for (const StorageStep step : {StorageStep::create, StorageStep::finish}) {
    const std::string name(storage_step_name(step));
    add_dcp(name);
    bool is_summed = false;
    const auto storage = faulty_storage(file_system_storage(run() / name), [&](const StorageEvent& event) {
      if (event.step == step && event.file.ends_with("/.metadata.1.tmp")) {
        is_summed = add_sidecar(run() / name).written;
      }
      return StorageFault::none;
    });
    write_state(state_to_save(), storage);
    EXPECT_TRUE(is_summed);
    expect_facts(run() / name, 2);
  }
}

TEST_F(AddSidecarTest, WhatASaveIsCommittingIsNotRemoved) {
  add_dcp("dcp");
  Sidecar of_save;
  of_save.files[".metadata"] = facts_of(as_bytes("of the save"));
  write_new_file(run() / "dcp/.tessera.json.tmp", write_sidecar(of_save, 1));
  add_text("dcp/.metadata.1.tmp", "of the save");
  EXPECT_ERROR(add_sidecar(run() / "dcp"), ErrorCode::invalid_argument,
               "found .tessera.json.tmp, expected none: another save is being committed; if it was killed");
  for (const char* name : {".tessera.json.tmp", ".metadata.1.tmp"})
    EXPECT_TRUE(fs::exists(run() / "dcp" / name)) << name;
  EXPECT_FALSE(fs::exists(run() / "dcp/.tessera.json"));
}

TEST_F(AddSidecarTest, SidecarsThatAreTooLargeAreNotRead) {
  const auto make_large = [&](const char* name) {
    add_text(name, "");
    fs::resize_file(run() / name, std::uint64_t{1} << 40);  // without data
  };
  add_dcp("dcp");
  make_large("dcp/.tessera.json");
  const AddSidecarReport report = add_sidecar(run() / "dcp");
  EXPECT_FALSE(report.written);
  ASSERT_FALSE(report.verified.problems.empty());
  EXPECT_THAT(report.verified.problems[0].what, HasSubstr("found 1099511627776 bytes, expected at most"));
  write_state(state_to_save(), file_system_storage(run() / "dcp"));
  expect_facts(run() / "dcp", 2);
  make_large("dcp/.tessera.json.tmp");
  EXPECT_ERROR(add_sidecar(run() / "dcp"), ErrorCode::corrupt,
               ".tessera.json.tmp: found 1099511627776 bytes, expected at most");
}

TEST_F(AddSidecarTest, ACheckpointThatIsReplacedMeanwhileIsAnError) {
  add_dcp("dcp");
  fs::remove(run() / "dcp/.tessera.json");
  AtTheEnd commit([&] {
    fs::copy(run() / "dcp/.metadata", run() / "dcp/.metadata.1.tmp");
    fs::rename(run() / "dcp/.metadata.1.tmp", run() / "dcp/.metadata");
  });
  AddSidecarOptions options;
  options.progress = &commit;
  EXPECT_ERROR(add_sidecar(run() / "dcp", options), ErrorCode::io, ".metadata: the file was changed meanwhile");
  EXPECT_FALSE(fs::exists(run() / "dcp/.tessera.json"));
  EXPECT_FALSE(fs::exists(run() / "dcp/.tessera.json.tmp"));
}

TEST_F(AddSidecarTest, ANameThatIsNotUtf8IsRefusedInADirectoryAndTheCheckpointStaysReadable) {
  fs::create_directory(run() / "st");
  fs::copy(runs::golden_safetensors_file(), run() / "st/\xff.safetensors");
  EXPECT_ERROR(add_sidecar(run() / "st"), ErrorCode::invalid_argument, "is not UTF-8, expected one");
  EXPECT_TRUE(verify(run() / "st").good());
}

TEST_F(AddSidecarTest, AFileWhoseNameIsNotUtf8GetsOne) {
  fs::copy(runs::golden_safetensors_file(), run() / "\xff.safetensors");
  EXPECT_TRUE(add_sidecar(run() / "\xff.safetensors").written);
  expect_facts(run() / "\xff.safetensors", 1);
}

TEST_F(AddSidecarTest, WhatIsNoCheckpointIsRefused) {
  EXPECT_ERROR(add_sidecar(run() / "nothing"), ErrorCode::not_found, "no such file or directory");
  EXPECT_ERROR(add_sidecar(run()), ErrorCode::not_found, "no checkpoint in this directory");
}

}  // namespace
}  // namespace tessera::checkpoint
