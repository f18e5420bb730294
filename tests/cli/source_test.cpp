// Sources that are not a checkpoint or cannot be read: every command reports this on one line and does not block.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <utility>

#include "cli/command.h"
#include "support/temporary_directory.h"

namespace tessera::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class SourceTest : public ::testing::TestWithParam<std::string> {
 protected:
  // Runs the command on a source. Its other arguments are valid.
  Outcome run_on(const fs::path& source, const Conditions& conditions = {}) const {
    const std::string command = GetParam();
    std::vector<std::string> arguments = {command, source};
    if (command == "convert") arguments.insert(arguments.end(), {out_ / "ck", "--to", "dcp"});
    if (command == "reshard") arguments.insert(arguments.end(), {out_ / "ck", "--ranks", "2"});
    if (command == "show") arguments.push_back("model.layers.6.weight");  // of 2.14-hf
    if (command == "diff") arguments.push_back(golden("2.14-optim"));
    if (command == "map") arguments.insert(arguments.end(), {"-o", out_ / "map.html"});
    return run_tessera(arguments, conditions);
  }

  void expect_failure(const Outcome& outcome, const std::string& message) const {
    EXPECT_EQ(outcome.status, 3);
    EXPECT_EQ(outcome.out, "");
    EXPECT_TRUE(is_one_error_line(outcome.err)) << outcome.err;
    EXPECT_THAT(outcome.err, HasSubstr(message));
    EXPECT_THAT(names_in(out_.path()), IsEmpty());
  }

  // `verify` and `sum` report damage as their result, with exit status 1.
  void expect_damage(const Outcome& outcome, const std::string& message) const {
    if (GetParam() != "verify" && GetParam() != "sum") return expect_failure(outcome, message);
    EXPECT_EQ(outcome.status, 1);
    EXPECT_THAT(outcome.out, HasSubstr(message));
    EXPECT_EQ(outcome.err, "");
  }

  const TemporaryDirectory folder_, out_;
};

TEST_P(SourceTest, MissingOrOfNoUse) {
  ASSERT_EQ(::mkfifo((folder_ / "fifo").c_str(), 0666), 0);
  fs::create_directory(folder_ / "empty");
  fs::create_directories(folder_ / "odd/.metadata");
  fs::create_symlink("nowhere", folder_ / "dangling");
  fs::create_symlink("loop", folder_ / "loop");
  expect_failure(run_on(folder_ / "missing"), "missing: no such file or directory");
  expect_failure(run_on(folder_ / "dangling"), "dangling: no such file or directory");
  expect_failure(run_on(folder_ / "loop"), "Too many levels of symbolic links");
  expect_failure(run_on(folder_ / "fifo"), "fifo: found a special file, expected a regular file");
  expect_failure(run_on("/dev/zero"), "/dev/zero: found a special file, expected a regular file");
  expect_failure(run_on(folder_ / "empty"),
                 "empty: no checkpoint in this directory, expected .metadata, metadata.pkl,");
  expect_failure(run_on(folder_ / "odd"), "odd/.metadata: found a directory, expected a regular file");
}

TEST_P(SourceTest, EmptyFiles) {
  fs::create_directory(folder_ / "dcp");
  for (const std::string name : {"a.pt", "a.safetensors", "dcp/.metadata"}) write_text(folder_ / name, "");
  expect_damage(run_on(folder_ / "a.pt"), "a.pt at byte 0: found an empty file, expected a torch.save archive or");
  expect_damage(run_on(folder_ / "a.safetensors"), "a.safetensors: safetensors: 0 bytes, expected at least 8");
  expect_damage(run_on(folder_ / "dcp"), ".metadata: end of the bytes at byte 0");
}

TEST_P(SourceTest, TorchCheckpointingWithoutTheFileOfARank) {
  fs::copy(golden("2.14-tc-fsdp"), folder_ / "ck");
  fs::remove(folder_ / "ck/model_1.pt");
  expect_damage(run_on(folder_ / "ck"), "model_1.pt");
}

TEST_P(SourceTest, WithoutThePermission) {
  ASSERT_EQ(run_tessera({"convert", golden("2.14-optim"), folder_ / "a.pt"}).status, 0);
  fs::copy(golden("2.14-optim"), folder_ / "ck");
  fs::create_directory(folder_ / "closed");
  for (const std::string name : {"a.pt", "ck/.metadata", "closed"}) fs::permissions(folder_ / name, fs::perms::none);
  Conditions conditions;
  conditions.without_root_rights = true;
  for (const std::string name : {"a.pt", "ck", "closed"}) {
    expect_failure(run_on(folder_ / name, conditions), "Permission denied");
  }
  fs::permissions(folder_ / "closed", fs::perms::owner_all);
}

// A model cache is a folder of links to blobs elsewhere.
TEST_P(SourceTest, SymbolicLinksAreFollowed) {
  fs::create_directories(folder_ / "blobs");
  fs::create_directories(folder_ / "snapshot");
  std::size_t blobs = 0;
  for (const auto& file : fs::directory_iterator(golden("2.14-hf"))) {
    const std::string blob = "blob-" + std::to_string(blobs++);
    fs::copy_file(file.path(), folder_ / "blobs" / blob);
    fs::create_symlink("../blobs/" + blob, folder_ / "snapshot" / file.path().filename());
  }
  fs::create_directory_symlink("snapshot", folder_ / "linked");
  for (const std::string name : {"snapshot", "linked"}) {
    const Outcome outcome = run_on(folder_ / name);
    EXPECT_EQ(outcome.status, GetParam() == "diff" ? 1 : 0) << outcome.err;
    EXPECT_EQ(outcome.err, "");
    if (GetParam() == "convert" || GetParam() == "reshard") {
      EXPECT_EQ(run_tessera({"diff", golden("2.14-hf"), out_ / "ck"}).status, 0);
      for (const auto& file : fs::directory_iterator(out_ / "ck")) EXPECT_FALSE(file.is_symlink());
      fs::remove_all(out_ / "ck");
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Commands, SourceTest,
                         ::testing::Values("inspect", "stats", "show", "verify", "convert", "reshard", "diff", "map",
                                           "sum"),
                         [](const auto& name) { return name.param; });

}  // namespace
}  // namespace tessera::testing
