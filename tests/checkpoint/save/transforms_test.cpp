// Items that are saved through transforms: layouts, order, damage, and the hooks around the commit.

#include "tessera/checkpoint/transform.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <filesystem>

#include "checkpoint/save/saved_states.h"
#include "checkpoint/transform/plain_items.h"
#include "support/chaos.h"
#include "support/error_matchers.h"
#include "support/temporary_directory.h"
#include "support/thread_ranks.h"
#include "tessera/checkpoint/convert.h"
#include "tessera/checkpoint/diff.h"
#include "tessera/checkpoint/save.h"
#include "tessera/checkpoint/tensor_reader.h"
#include "tessera/checkpoint/verify.h"
#include "tessera/format/dcp_metadata.h"

namespace tessera::checkpoint {
namespace {

using namespace saved;
using ::tessera::testing::put_byte;
using ::tessera::testing::run_thread_ranks;
using ::tessera::testing::TemporaryDirectory;
using ::tessera::testing::ThreadLink;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Exchanges upper and lower case, as PyTorch's Rot13Example does, and appends or removes a last byte.
class CaseSwap final : public StreamTransform {
 public:
  explicit CaseSwap(std::string name = "test.case") : name_(std::move(name)) {}
  std::string descriptor() const override { return name_ + "/1"; }
  std::unique_ptr<ByteSink> apply(ByteSink& out) const override { return std::make_unique<Stream>(out, true); }
  std::unique_ptr<ByteSink> undo(ByteSink& out) const override { return std::make_unique<Stream>(out, false); }

 private:
  class Stream final : public ByteSink {
   public:
    Stream(ByteSink& out, bool appends) : out_(out), appends_(appends) {}
    void write(ByteView bytes) override {
      for (const std::uint8_t byte : bytes) {
        if (!appends_ && has_held_) block_.push_back(held_);
        has_held_ = true;
        const bool is_letter = (byte >= 'A' && byte <= 'Z') || (byte >= 'a' && byte <= 'z');
        held_ = static_cast<std::uint8_t>(is_letter ? byte ^ 0x20u : byte);
        if (appends_) block_.push_back(held_);
      }
      out_.write(block_);
      block_.clear();
    }
    void finish() override {
      if (appends_) out_.write(as_bytes("!"));
      if (!appends_ && (!has_held_ || held_ != '!')) fail(ErrorCode::corrupt, "undo test.case: found no last byte '!'");
      out_.finish();
    }

   private:
    ByteSink& out_;
    bool appends_, has_held_ = false;
    std::uint8_t held_ = 0;
    Bytes block_;
  };
  std::string name_;
};

// Undoes nothing but writes without end.
class Flood final : public StreamTransform {
 public:
  std::string descriptor() const override { return "test.flood"; }
  std::unique_ptr<ByteSink> apply(ByteSink& out) const override { return std::make_unique<Stream>(out, 1); }
  std::unique_ptr<ByteSink> undo(ByteSink& out) const override { return std::make_unique<Stream>(out, 1 << 20); }

 private:
  class Stream final : public ByteSink {
   public:
    Stream(ByteSink& out, int times) : out_(out), times_(times) {}
    void write(ByteView bytes) override {
      for (int i = 0; i < times_; ++i) out_.write(bytes);
    }
    void finish() override { out_.finish(); }

   private:
    ByteSink& out_;
    int times_;
  };
};

OpenOptions knows_all() {
  auto registry = std::make_shared<TransformRegistry>();
  for (const std::string name : {"test.case", "test.other"}) {
    registry->add(name, [name](const std::string& version) -> TransformPtr {
      EXPECT_EQ(version, "1");
      return std::make_shared<const CaseSwap>(name);
    });
  }
  registry->add("test.flood", [](const std::string&) -> TransformPtr { return std::make_shared<const Flood>(); });
  OpenOptions options;
  options.transforms = registry;
  return options;
}

std::vector<std::vector<TransformPtr>> lists_of_transforms() {
  const TransformPtr swap = std::make_shared<const CaseSwap>();
  std::vector<std::vector<TransformPtr>> lists = {{swap}, {swap, std::make_shared<const CaseSwap>("test.other")}};
  if (has_zstd()) {
    lists.push_back({zstd_transform()});
    lists.push_back({zstd_transform(1), swap});
    lists.push_back({swap, zstd_transform(9)});
  }
  return lists;
}

void expect_loads_transformed(int ranks, const Layout& layout, const std::shared_ptr<Storage>& storage) {
  const auto errors = run_thread_ranks(ranks, [&](ThreadLink& link) {
    const Wanted wanted = wanted_of(layout, link.rank(), ranks);
    const ReadReport report = read_state(wanted.targets, open_on_all_ranks(storage, link, knows_all()), link);
    EXPECT_TRUE(wanted.is_right());
    EXPECT_EQ(pickle::repr(report.objects.at("step").value), "100");
  });
  EXPECT_THAT(errors, Each(""));
}

// PyTorch: `_extensions` of FileSystemWriter, with Rot13Example and ZStandard.
TEST(TransformTest, EveryLayoutIsSavedThroughThemAndLoadedInEveryOther) {
  ::tessera::testing::SampleIfSanitized saves(3), loads(3);
  for (const std::vector<TransformPtr>& transforms : lists_of_transforms()) {
    for (const std::size_t files : {std::size_t{1}, std::size_t{3}, std::size_t{0}}) {
      WriteOptions options;
      options.transforms = transforms;
      options.files_per_rank = files;
      for (const NamedLayout& from : layouts()) {
        if (!saves.takes_next()) continue;
        const auto storage = memory_storage();
        EXPECT_THAT(save_on(3, from.boxes, storage, options), Each(""));
        for (const NamedLayout& to : layouts()) {
          if (loads.takes_next()) expect_loads_transformed(4, to.boxes, storage);
        }
      }
    }
  }
}

TEST(TransformTest, ReadingRowsOfColumnsOfManyRanksUndoesEachItemOnce) {
  class Counted final : public StreamTransform {
   public:
    explicit Counted(std::atomic<int>& undone) : undone_(undone) {}
    std::string descriptor() const override { return inner_.descriptor(); }
    std::unique_ptr<ByteSink> apply(ByteSink& out) const override { return inner_.apply(out); }
    std::unique_ptr<ByteSink> undo(ByteSink& out) const override {
      ++undone_;
      return inner_.undo(out);
    }

   private:
    CaseSwap inner_{"test.counted"};
    std::atomic<int>& undone_;
  };
  constexpr int columns = 40;
  const Shape shape = {6, columns};
  std::atomic<int> undone = 0;
  WriteOptions options;
  options.transforms = {std::make_shared<const Counted>(undone)};
  const auto storage = memory_storage();
  const auto errors = run_thread_ranks(columns, [&](ThreadLink& link) {
    write_state({tensor_entry("t", shape, layouts()[1].boxes(shape, link.rank(), columns))}, storage, link, options);
  });
  EXPECT_THAT(errors, Each(""));
  auto registry = std::make_shared<TransformRegistry>();
  registry->add("test.counted", [&](const std::string&) { return std::make_shared<const Counted>(undone); });
  OpenOptions open_options;
  open_options.transforms = registry;
  const TensorReader reader(Checkpoint::open(storage, open_options), 0);
  for (std::int64_t row = 0; row < shape[0]; ++row) {
    Bytes bytes(columns * sizeof(std::int64_t));
    reader.read(Box({row, 0}, {1, columns}), bytes);
    EXPECT_EQ(load_little_endian<std::uint64_t>(bytes.data()), static_cast<std::uint64_t>(row * columns));
  }
  EXPECT_EQ(undone, columns);
}

TEST(TransformTest, TheMetadataListsThemInTheOrderOfUndoing) {
  WriteOptions options;
  options.transforms = {std::make_shared<const CaseSwap>(), std::make_shared<const CaseSwap>("test.other")};
  const auto storage = memory_storage();
  EXPECT_THAT(save_on(2, layouts()[0].boxes, storage, options), Each(""));
  const auto checkpoint = Checkpoint::open(storage);
  const dcp::Metadata& metadata = *checkpoint->dcp_metadata();
  EXPECT_THAT(metadata.transforms, ElementsAre(ElementsAre(), ElementsAre("test.other/1", "test.case/1")));
  // Each rank may have its own, and none of them again the next time.
  const auto errors = run_thread_ranks(2, [&](ThreadLink& link) {
    WriteOptions own;
    if (link.rank() == 1) own.transforms = {std::make_shared<const CaseSwap>()};
    write_state(state_of(layouts()[0].boxes, link.rank(), 2), storage, link, own);
  });
  EXPECT_THAT(errors, Each(""));
  EXPECT_THAT(Checkpoint::open(storage)->dcp_metadata()->transforms,
              ElementsAre(ElementsAre(), ElementsAre("test.case/1")));
  expect_loads_transformed(3, layouts()[1].boxes, storage);
  EXPECT_THAT(save_on(2, layouts()[0].boxes, storage), Each(""));
  EXPECT_THAT(Checkpoint::open(storage)->dcp_metadata()->transforms, ElementsAre(ElementsAre()));
}

TEST(TransformTest, AReaderThatDoesNotKnowOneNamesIt) {
  WriteOptions options;
  options.transforms = {std::make_shared<const CaseSwap>()};
  const auto storage = memory_storage();
  EXPECT_THAT(save_on(1, layouts()[0].boxes, storage, options), Each(""));
  const auto checkpoint = Checkpoint::open(storage);
  EXPECT_ERROR(checkpoint->locate(1, 0), ErrorCode::unsupported, "memory/__0_0.distcp at byte", "tensor 'tensor [7]'",
               "stored with the transform 'test.case/1', which is not registered");
  EXPECT_ERROR(checkpoint->load_object(0), ErrorCode::unsupported, "object 'step'", "'test.case/1'");
  TransformRegistry registry;
  registry.add("null", [](const std::string&) { return TransformPtr(); });
  EXPECT_ERROR(registry.create(std::vector<std::string>{"null/2"}), ErrorCode::invalid_argument, "'null' is null");
  if (!has_zstd()) return;
  EXPECT_EQ(registry.create(std::vector<std::string>{"stream.zstd/1.7"}).at(0)->descriptor(), "stream.zstd/1");
  EXPECT_ERROR(registry.create(std::vector<std::string>{"stream.zstd/2"}), ErrorCode::unsupported,
               "version '2' of stream.zstd, expected 1");
  EXPECT_ERROR(zstd_transform(20), ErrorCode::invalid_argument, "level 20, expected 1 to 19");
}

class TransformFilesTest : public ::testing::Test {
 protected:
  // A tensor of 12 MiB, in rows of 8 KiB, and a small one, compressed or with an appended byte.
  void save_large() {
    WriteOptions options;
    options.transforms = {has_zstd() ? zstd_transform() : std::make_shared<const CaseSwap>()};
    const auto storage = file_system_storage(directory_ / "ck");
    report_ = write_state({tensor_entry("large", kLarge, {Box::full(kLarge)}), object_entry("step", 3),
                           tensor_entry("small", {7}, {Box({0}, {7})})},
                          storage, alone(), options);
  }
  std::shared_ptr<const Checkpoint> open() { return Checkpoint::open(directory_ / "ck", knows_all()); }

  const Shape kLarge = {1536, 1024};
  TemporaryDirectory directory_;
  WriteReport report_;
};

TEST_F(TransformFilesTest, AnyPartOfALargeItemIsReadAndNoFileIsLeft) {
  const std::filesystem::path temporary = directory_ / "tmp";
  std::filesystem::create_directory(temporary);
  ::setenv("TMPDIR", temporary.c_str(), 1);
  save_large();
  EXPECT_EQ(report_.written_bytes, std::filesystem::file_size(directory_ / "ck" / "__0_0.distcp"));
  if (has_zstd()) {
    EXPECT_LT(report_.written_bytes, 8u << 20);
  }
  Wanted wanted;
  wanted.add("large", kLarge, {Box({700, 1000}, {500, 24}), Box({0, 0}, {1, 1024}), Box({1535, 1023}, {1, 1})}, true);
  wanted.add("small", {7}, {Box({2}, {3})});
  read_state(wanted.targets, open());
  EXPECT_TRUE(wanted.is_right());
  EXPECT_TRUE(std::filesystem::is_empty(temporary));
}

TEST_F(TransformFilesTest, WithoutADirectoryForTemporaryFilesALargeItemIsAnError) {
  save_large();
  ::setenv("TMPDIR", (directory_ / "nowhere").c_str(), 1);
  EXPECT_ERROR(open()->locate(0, 0), ErrorCode::io, "tensor 'large'", "the directory for temporary files (TMPDIR)");
  ::unsetenv("TMPDIR");
}

TEST_F(TransformFilesTest, TheyAreVerifiedConvertedAndCompared) {
  if (!has_zstd()) GTEST_SKIP() << "tessera was built without libzstd, which is optional";
  save_large();
  const VerifyReport report = verify(directory_ / "ck");
  EXPECT_TRUE(report.good()) << report.problems.at(0).what;
  ConvertOptions options;
  options.to = SourceKind::dcp;
  convert(Checkpoint::open(directory_ / "ck"), directory_ / "plain", options);
  EXPECT_THAT(Checkpoint::open(directory_ / "plain")->dcp_metadata()->transforms, ElementsAre(ElementsAre()));
  EXPECT_TRUE(verify(directory_ / "plain").good());
  EXPECT_TRUE(diff(open(), Checkpoint::open(directory_ / "plain")).same());
}

TEST_F(TransformFilesTest, DamageIsNamed) {
  save_large();
  const auto checkpoint = open();
  const StoredRange stored = checkpoint->tensors()[0].stored[0];
  put_byte(directory_ / "ck" / "__0_0.distcp", static_cast<std::int64_t>(stored.offset_bytes + stored.length_bytes - 1),
           0x55);
  std::filesystem::remove(directory_ / "ck" / ".tessera.json");  // else it reports the damage first
  Wanted wanted;
  wanted.add("large", kLarge, {Box({0, 0}, {1, 1})});
  EXPECT_ERROR(read_state(wanted.targets, open()), ErrorCode::corrupt, "__0_0.distcp at byte", "tensor 'large'",
               has_zstd() ? "undo zstd" : "undo test.case");
}

TEST_F(TransformFilesTest, AnItemThatGrowsWithoutEndIsRefused) {
  WriteOptions options;
  options.transforms = {std::make_shared<const Flood>()};
  const auto storage = memory_storage();
  write_state({tensor_entry("few", {7}, {Box({0}, {7})})}, storage, alone(), options);
  EXPECT_ERROR(Checkpoint::open(storage, knows_all())->locate(0, 0), ErrorCode::corrupt, "tensor 'few'",
               "without its transforms the item has more than 1048688 bytes");
}

TEST(TransformTest, WhereNoReaderWouldUndoThemTheyAreRefused) {
  WriteOptions options;
  options.transforms = {std::make_shared<const CaseSwap>()};
  options.format = SaveFormat::safetensors_shards;
  EXPECT_THAT(save_on(2, layouts()[0].boxes, memory_storage(), options),
              Each(HasSubstr("transforms of safetensors shards, expected none")));
  options.format = SaveFormat::dcp;
  options.dialect = dcp::Dialect::torch_2_0;
  EXPECT_THAT(save_on(2, layouts()[0].boxes, memory_storage(), options),
              Each(HasSubstr("transforms in the dialect of an early PyTorch, expected none")));
  options.dialect = dcp::Dialect::torch_2;
  options.transforms = {nullptr};
  EXPECT_THAT(save_on(2, layouts()[0].boxes, memory_storage(), options), Each(HasSubstr("a transform is null")));
}

TEST(TransformTest, AFailureRemovesTheFiles) {
  // A transform that fails after a while, on one rank.
  class Broken final : public StreamTransform {
   public:
    std::string descriptor() const override { return "broken/1"; }
    std::unique_ptr<ByteSink> apply(ByteSink&) const override { fail(ErrorCode::io, "no key"); }
    std::unique_ptr<ByteSink> undo(ByteSink&) const override { fail(ErrorCode::io, "no key"); }
  };
  const auto storage = memory_storage();
  EXPECT_THAT(save_on(3, layouts()[0].boxes, storage), Each(""));
  const std::vector<std::string> before = storage->list();
  const auto errors = run_thread_ranks(3, [&](ThreadLink& link) {
    WriteOptions options;
    if (link.rank() == 1) options.transforms = {std::make_shared<const Broken>()};
    write_state(state_of(layouts()[0].boxes, link.rank(), 3, 7), storage, link, options);
  });
  EXPECT_THAT(errors, Each(AllOf(HasSubstr("rank 1"), HasSubstr("no key"))));
  EXPECT_EQ(storage->list(), before);
  expect_loads_on(2, layouts()[0].boxes, storage);
}

// --- hooks: PyTorch's experimental CheckpointWriter, whose barrier is between its hooks

// Each item below is in a file, as memory is full.
TEST(PlainItemsTest, CheckpointsShareTheDescriptorsOfTheProcess) {
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  const rlimit few{256, before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &few), 0);
  const auto full = std::make_shared<MemoryOfItems>();
  ASSERT_TRUE(full->take(std::uint64_t{64} << 20));
  const MemorySource stored(as_bytes("item"), "stored");
  int made = 0;
  const auto make = [&](const std::shared_ptr<MemoryOfItems>&) {
    ++made;
    return undo_transforms(stored, 0, stored.size_bytes(), {}, 100, full);
  };
  {
    std::array<PlainItems, 3> checkpoints;
    for (std::uint32_t number = 0; number < 200; ++number) {
      for (PlainItems& items : checkpoints) {
        ASSERT_NO_THROW(EXPECT_EQ(as_text(read_all(*items.get(number, make))), "item")) << number;
      }
    }
    EXPECT_EQ(made, 600);
    for (PlainItems& items : checkpoints) {
      for (std::uint32_t number = 199; number > 184; --number) items.get(number, make);
    }
    EXPECT_EQ(made, 600);  // the last ones are there
  }
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
}

TEST(CommitHookTest, AllRanksAreBeforeTheCommitUntilItIsMadeAndAfterItThen) {
  for (const SaveFormat format : {SaveFormat::dcp, SaveFormat::safetensors_shards}) {
    const auto storage = memory_storage();
    std::atomic<int> before = 0, after = 0;
    const auto is_committed = [&] {
      const std::vector<std::string> names = storage->list();
      return std::any_of(names.begin(), names.end(), [](const std::string& name) {
        return name == ".metadata" || (name.ends_with(".safetensors") && name.starts_with("shard-"));
      });
    };
    WriteOptions options;
    options.format = format;
    options.before_commit = [&] {
      EXPECT_FALSE(is_committed());
      ++before;
    };
    options.after_commit = [&] {
      EXPECT_EQ(before, 4);
      EXPECT_TRUE(is_committed());
      ++after;
    };
    EXPECT_THAT(save_on(4, layouts()[0].boxes, storage, options), Each(""));
    EXPECT_EQ(before, 4);
    EXPECT_EQ(after, 4);
  }
}

TEST(CommitHookTest, OneThatThrowsBeforeTheCommitLeavesTheOldCheckpointOnEveryRank) {
  const auto storage = memory_storage();
  EXPECT_THAT(save_on(3, layouts()[0].boxes, storage), Each(""));
  const std::vector<std::string> names = storage->list();
  for (int wrong = 0; wrong < 3; ++wrong) {
    const auto errors = run_thread_ranks(3, [&](ThreadLink& link) {
      WriteOptions options;
      if (link.rank() == wrong) options.before_commit = [] { fail(ErrorCode::io, "the quota is used up"); };
      write_state(state_of(layouts()[0].boxes, link.rank(), 3, 7), storage, link, options);
    });
    EXPECT_THAT(errors, Each(AllOf(HasSubstr("rank " + std::to_string(wrong)), HasSubstr("the quota is used up"))));
    EXPECT_EQ(storage->list(), names);
    expect_loads_on(2, layouts()[0].boxes, storage);
  }
}

TEST(CommitHookTest, OneThatThrowsAfterTheCommitIsAnErrorOnEveryRankAndTheCheckpointStays) {
  for (int wrong = 0; wrong < 3; ++wrong) {
    const auto storage = memory_storage();
    const auto errors = run_thread_ranks(3, [&](ThreadLink& link) {
      WriteOptions options;  // the other ranks have no hook
      if (link.rank() == wrong) options.after_commit = [] { fail(ErrorCode::io, "no upload"); };
      write_state(state_of(layouts()[0].boxes, link.rank(), 3, 7), storage, link, options);
    });
    EXPECT_THAT(errors, Each(AllOf(HasSubstr("after the commit"), HasSubstr("rank " + std::to_string(wrong)),
                                   HasSubstr("no upload"))));
    expect_loads_on(2, layouts()[0].boxes, storage, 7);
  }
}

}  // namespace
}  // namespace tessera::checkpoint
