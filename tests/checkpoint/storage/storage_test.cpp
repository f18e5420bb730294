// The conformance suite that every storage passes.

#include "tessera/checkpoint/storage.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "support/error_matchers.h"
#include "support/temporary_directory.h"
#include "tessera/checkpoint/faulty_storage.h"

namespace tessera::checkpoint {
namespace {

using ::tessera::testing::TemporaryDirectory;
using ::testing::ElementsAre;

Bytes bytes_of(const std::string& text) { return {text.begin(), text.end()}; }

class StorageTest : public ::testing::TestWithParam<const char*> {
 protected:
  std::shared_ptr<Storage> make() {
    const std::string kind = GetParam();
    const auto no_fault = [](const StorageEvent&) { return StorageFault::none; };
    if (kind == "memory") return memory_storage();
    if (kind == "faulty") return faulty_storage(memory_storage(), no_fault);
    return file_system_storage(directory_ / "above" / "place");
  }

 private:
  TemporaryDirectory directory_;
};
INSTANTIATE_TEST_SUITE_P(Kinds, StorageTest, ::testing::Values("file_system", "memory", "faulty"),
                         [](const auto& kind) { return std::string(kind.param); });

TEST_P(StorageTest, NothingIsThereBeforeItIsMade) {
  const auto storage = make();
  EXPECT_THAT(storage->list(), ElementsAre());
  EXPECT_EQ(storage->size_bytes("a"), std::nullopt);
  storage->prepare();
  storage->prepare();
  EXPECT_THAT(storage->list(), ElementsAre());
}

TEST_P(StorageTest, WhatIsWrittenInAnyOrderByThreadsIsRead) {
  const auto storage = make();
  storage->prepare();
  const std::string text = "the quick brown fox jumps over the lazy dog";
  const auto file = storage->create("a", text.size());
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < text.size(); ++i) {
    threads.emplace_back(
        [&, i] { file->write_at(text.size() - 1 - i, as_bytes(text.substr(text.size() - 1 - i, 1))); });
  }
  for (std::thread& thread : threads) thread.join();
  file->start_writeback(0, text.size());
  file->finish();
  storage->sync();
  EXPECT_EQ(read_file(*storage, "a"), bytes_of(text));
  EXPECT_EQ(storage->size_bytes("a"), text.size());
  const auto opened = storage->open("a");
  EXPECT_EQ(opened->size_bytes(), text.size());
  Bytes part(5);
  opened->read_at(4, part);
  EXPECT_EQ(as_text(part), "quick");
  EXPECT_ERROR(opened->read_at(text.size() - 1, part), ErrorCode::corrupt, storage->name_of("a"));
}

TEST_P(StorageTest, FilesAreListedSorted) {
  const auto storage = make();
  storage->prepare();
  for (const char* name : {"b", ".hidden", "c", "a"}) write_new_file(*storage, name, as_bytes(name));
  EXPECT_THAT(storage->list(), ElementsAre(".hidden", "a", "b", "c"));
}

TEST_P(StorageTest, AFileThatIsThereIsNotMadeAgain) {
  const auto storage = make();
  storage->prepare();
  write_new_file(*storage, "a", as_bytes("first"));
  EXPECT_ERROR(storage->create("a", 3), ErrorCode::invalid_argument, storage->name_of("a"));
  EXPECT_EQ(read_file(*storage, "a"), bytes_of("first"));
}

TEST_P(StorageTest, AFileThatIsNotThereIsNamed) {
  const auto storage = make();
  storage->prepare();
  EXPECT_ERROR(storage->open("a"), ErrorCode::not_found, storage->name_of("a"));
  EXPECT_ERROR(storage->rename("a", "b"), ErrorCode::not_found, storage->name_of("a"));
  storage->remove("a");
}

TEST_P(StorageTest, ARenameReplaces) {
  const auto storage = make();
  storage->prepare();
  write_new_file(*storage, "a", as_bytes("new"));
  write_new_file(*storage, "b", as_bytes("old"));
  const auto opened = storage->open("b");
  storage->rename("a", "b");
  storage->sync();
  EXPECT_THAT(storage->list(), ElementsAre("b"));
  EXPECT_EQ(read_file(*storage, "b"), bytes_of("new"));
  EXPECT_EQ(read_all(*opened), bytes_of("old"));
}

TEST_P(StorageTest, ARenameToANewNameReplacesNothing) {
  const auto storage = make();
  storage->prepare();
  write_new_file(*storage, "a", as_bytes("first"));
  write_new_file(*storage, "b", as_bytes("second"));
  EXPECT_FALSE(storage->rename_new("a", "b"));
  EXPECT_EQ(read_file(*storage, "a"), bytes_of("first"));
  EXPECT_EQ(read_file(*storage, "b"), bytes_of("second"));
  EXPECT_TRUE(storage->rename_new("a", "c"));
  EXPECT_THAT(storage->list(), ElementsAre("b", "c"));
  EXPECT_EQ(read_file(*storage, "c"), bytes_of("first"));
  EXPECT_ERROR(storage->rename_new("a", "d"), ErrorCode::not_found, storage->name_of("a"));
}

TEST_P(StorageTest, WhatIsOpenOutlivesItsRemoval) {
  const auto storage = make();
  storage->prepare();
  write_new_file(*storage, "a", as_bytes("text"));
  const auto opened = storage->open("a");
  storage->remove("a");
  EXPECT_THAT(storage->list(), ElementsAre());
  EXPECT_EQ(read_all(*opened), bytes_of("text"));
  write_new_file(*storage, "a", as_bytes("again"));
  EXPECT_EQ(read_all(*opened), bytes_of("text"));
}

TEST_P(StorageTest, AFileTooLargeIsRefused) {
  const auto storage = make();
  storage->prepare();
  write_new_file(*storage, "a", as_bytes("text"));
  EXPECT_ERROR(read_file(*storage, "a", 3), ErrorCode::corrupt, "found 4 bytes, expected at most 3");
}

TEST(FaultyStorageTest, FailsAsAsked) {
  const auto inner = memory_storage();
  StorageFault fault = StorageFault::io_error;
  const auto storage = faulty_storage(
      inner, [&](const StorageEvent& event) { return event.step == StorageStep::write ? fault : StorageFault::none; });
  EXPECT_ERROR(write_new_file(*storage, "a", as_bytes("text")), ErrorCode::io, "write memory/a: failed on command");
  fault = StorageFault::short_write;
  EXPECT_ERROR(write_new_file(*storage, "b", as_bytes("text")), ErrorCode::io, "write memory/b");
  EXPECT_EQ(read_file(*inner, "b"), (Bytes{'t', 'e', 0, 0}));
}

TEST(FileSystemStorageTest, APathThatCannotBeCreatedIsAnError) {
  const TemporaryDirectory directory;
  EXPECT_ERROR(file_system_storage("")->prepare(), ErrorCode::invalid_argument, "the path is empty, expected the path");
  EXPECT_ERROR(file_system_storage(directory / std::string(300, 'a'))->prepare(), ErrorCode::io, "File name too long");
}

TEST(FileSystemStorageTest, AFullDiskIsKnownBeforeAnythingIsWrittenAndLeavesNothing) {
  const TemporaryDirectory directory;
  const auto storage = file_system_storage(directory.path());
  EXPECT_ERROR(storage->create("a", std::uint64_t{1} << 60), ErrorCode::io, "reserve", "/a");
  EXPECT_THAT(storage->list(), ElementsAre());
}

}  // namespace
}  // namespace tessera::checkpoint
