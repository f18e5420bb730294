// Conversions that replace their destination.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include "support/error_matchers.h"
#include "support/paths.h"
#include "support/system_calls.h"
#include "support/temporary_directory.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/convert.h"
#include "tessera/checkpoint/diff.h"
#include "tessera/checkpoint/manage/add_sidecar.h"
#include "tessera/checkpoint/verify.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;
using ::tessera::testing::run_killed_at_change;

class ReplaceTest : public ::testing::Test {
 protected:
  static std::shared_ptr<const Checkpoint> golden_one(const std::string& name) {
    return Checkpoint::open(fs::path(testing::source_dir()) / "tests/golden/checkpoints" / name / "ck");
  }
  static ConvertOptions options(SourceKind to, bool replace = true) {
    ConvertOptions options;
    options.to = to;
    options.replace = replace;
    options.selection.select = {"model.*"};
    options.jobs = 1;
    return options;
  }
  static bool same_model(const std::shared_ptr<const Checkpoint>& source, const fs::path& converted) {
    DiffOptions of_model;
    of_model.selection.select = {"model.*"};
    return diff(source, Checkpoint::open(converted), of_model).same();
  }

  // Kills a conversion to `name` at each change of files. The old state or the new one must be there, and good.
  void expect_old_or_new(const std::string& name, SourceKind to) {
    std::size_t kills = 0, old_ones = 0;
    for (;; ++kills) {
      SCOPED_TRACE(kills);
      const testing::TemporaryDirectory directory;
      const fs::path destination = directory / name;
      convert(old_, destination, options(to, false));
      const auto killed = run_killed_at_change(kills, [&] { convert(new_, destination, options(to)); });
      EXPECT_TRUE(verify(destination).good());
      const bool is_old = same_model(old_, destination);
      old_ones += is_old ? 1 : 0;
      EXPECT_TRUE(is_old || same_model(new_, destination));
      if (killed.was_killed) continue;
      EXPECT_EQ(killed.status, 0);
      EXPECT_FALSE(is_old);
      break;
    }
    EXPECT_GT(kills, 3u);
    EXPECT_GT(old_ones, 1u);
  }

  const std::shared_ptr<const Checkpoint> old_ = golden_one("2.6-optim"), new_ = golden_one("2.14-optim");
};

TEST_F(ReplaceTest, KilledAtAnyInstantADirectoryIsTheOldOneOrTheNewOne) {
  ASSERT_FALSE(diff(old_, new_, {}).same());
  expect_old_or_new("ck", SourceKind::dcp);
}

TEST_F(ReplaceTest, KilledAtAnyInstantAFileIsTheOldOneOrTheNewOne) {
  expect_old_or_new("model.safetensors", SourceKind::safetensors);
}

TEST_F(ReplaceTest, ASidecarWithoutAFileIsNotThatOfANewFile) {
  const testing::TemporaryDirectory directory;
  const fs::path destination = directory / "model.pt";
  convert(old_, destination, options(SourceKind::torch, false));
  add_sidecar(destination);
  fs::remove(destination);
  ConvertOptions one = options(SourceKind::torch, false);
  one.selection.select = {"model.2.*"};
  convert(new_, destination, one);
  EXPECT_TRUE(verify(destination).good());
  EXPECT_FALSE(fs::exists(directory / "model.pt.tessera.json"));
}

TEST_F(ReplaceTest, NothingButACheckpointIsReplaced) {
  const testing::TemporaryDirectory directory;
  fs::create_directory(directory / "notes");
  write_new_file(directory / "notes/a.txt", as_bytes("a"));
  EXPECT_ERROR(convert(new_, directory / "notes", options(SourceKind::dcp)), ErrorCode::invalid_argument,
               "found a directory that is no checkpoint, expected that of a checkpoint to replace");
  convert(old_, directory / "ck", options(SourceKind::dcp));
  fs::create_directory(directory / "ck/step-1");
  EXPECT_ERROR(convert(new_, directory / "ck", options(SourceKind::dcp)), ErrorCode::invalid_argument,
               "has directories in it");
  fs::remove(directory / "ck/step-1");
  EXPECT_ERROR(convert(new_, directory / "ck", options(SourceKind::dcp, false)), ErrorCode::invalid_argument,
               "already exists");
  fs::create_directory_symlink("ck", directory / "link");
  EXPECT_ERROR(convert(new_, directory / "link", options(SourceKind::dcp)), ErrorCode::invalid_argument,
               "symbolic link");
  write_new_file(directory / "file", as_bytes("a"));
  EXPECT_ERROR(convert(new_, directory / "file", options(SourceKind::dcp)), ErrorCode::invalid_argument,
               "found a file, expected a directory to replace");
  EXPECT_TRUE(same_model(old_, directory / "ck"));
}

TEST_F(ReplaceTest, ALinkToItselfIsReplacedWithTheDirectory) {
  const testing::TemporaryDirectory directory;
  convert(old_, directory / "ck", options(SourceKind::dcp));
  fs::create_symlink("loop", directory / "ck/loop");
  convert(new_, directory / "ck", options(SourceKind::dcp));
  EXPECT_TRUE(same_model(new_, directory / "ck"));
  EXPECT_FALSE(fs::is_symlink(directory / "ck/loop"));
}

TEST_F(ReplaceTest, TheSourceIsNeverReplaced) {
  const testing::TemporaryDirectory directory;
  convert(old_, directory / "ck", options(SourceKind::dcp));
  const auto source = Checkpoint::open(directory / "ck");
  EXPECT_ERROR(convert(source, directory / "ck", options(SourceKind::dcp)), ErrorCode::invalid_argument,
               "the destination is the source");
  convert(old_, directory / "ck/model.safetensors.d", options(SourceKind::dcp));
  const auto inner = Checkpoint::open(directory / "ck/model.safetensors.d");
  EXPECT_ERROR(convert(inner, directory / "ck", options(SourceKind::dcp)), ErrorCode::invalid_argument,
               "the source is within the destination");
}

}  // namespace
}  // namespace tessera::checkpoint
