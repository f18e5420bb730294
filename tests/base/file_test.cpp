#include "tessera/base/file.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>

#include "support/error_matchers.h"
#include "support/temporary_directory.h"

namespace {
std::atomic<int> interrupted_syncs = 0;
}  // namespace

// In place of the C library's: a signal interrupts the next `interrupted_syncs` calls.
extern "C" int fsync(int descriptor) {
  if (interrupted_syncs-- > 0) {
    errno = EINTR;
    return -1;
  }
  interrupted_syncs = 0;
  return static_cast<int>(::syscall(SYS_fsync, descriptor));
}

namespace tessera {
namespace {

using testing::TemporaryDirectory;

TEST(FileTest, WhatIsWrittenAtAnOffsetIsReadThere) {
  const TemporaryDirectory directory;
  File file = File::create_new(directory / "a");
  file.preallocate(10);
  EXPECT_EQ(file.size_bytes(), 10u);
  file.write_at(4, as_bytes("abc"));
  file.sync();
  Bytes read(5);
  file.read_at(3, read);
  EXPECT_EQ(as_text(read), std::string_view("\0abc\0", 5));
  file.close();
}

TEST(FileTest, ReadingPastTheEndSaysWhereTheFileEnds) {
  const TemporaryDirectory directory;
  write_new_file(directory / "a", as_bytes("12345"));
  const File file = File::open_read(directory / "a");
  Bytes read(4);
  EXPECT_ERROR(file.read_at(3, read), ErrorCode::corrupt, "/a at byte 5", "ends at byte 5", "expected 2 more bytes");
}

TEST(FileTest, AMissingFileIsNotFound) {
  EXPECT_ERROR(File::open_read("/nowhere/x"), ErrorCode::not_found, "open /nowhere/x", "No such file");
}

TEST(FileTest, OnlyRegularFilesAreOpened) {
  const TemporaryDirectory directory;
  EXPECT_ERROR(File::open_read(directory.path()), ErrorCode::invalid_argument, "found a directory");
  ASSERT_EQ(::mkfifo((directory / "pipe").c_str(), 0600), 0);
  EXPECT_ERROR(File::open_read(directory / "pipe"), ErrorCode::invalid_argument, "special file");
}

TEST(FileTest, CreatingWhatExistsFails) {
  const TemporaryDirectory directory;
  write_new_file(directory / "a", {});
  EXPECT_ERROR(File::create_new(directory / "a"), ErrorCode::invalid_argument, "create", "exists");
}

TEST(FileTest, WritingToAFullDeviceNamesIt) {
  // /dev/full is not a regular file, so the test cannot use it. A reservation that is too large has the same effect on
  // any disk.
  const TemporaryDirectory directory;
  File file = File::create_new(directory / "a");
  EXPECT_ERROR(file.preallocate(std::uint64_t{1} << 60), ErrorCode::io, "reserve", "/a");
}

TEST(FileTest, ASyncThatASignalInterruptsIsCalledAgain) {
  const TemporaryDirectory directory;
  File file = File::create_new(directory / "a");
  interrupted_syncs = 3;
  file.sync();
  EXPECT_EQ(interrupted_syncs, 0);
  interrupted_syncs = 3;
  sync_directory(directory.path());
  EXPECT_EQ(interrupted_syncs, 0);
}

TEST(FileTest, ReadingAWholeFileRespectsTheLimit) {
  const TemporaryDirectory directory;
  write_new_file(directory / "a", as_bytes("12345"));
  EXPECT_EQ(as_text(read_file(directory / "a", 5)), "12345");
  EXPECT_ERROR(read_file(directory / "a", 4), ErrorCode::corrupt, "found 5 bytes, expected at most 4");
}

TEST(RenameTest, NewNameMustNotExist) {
  const TemporaryDirectory directory;
  write_new_file(directory / "a", as_bytes("a"));
  write_new_file(directory / "b", as_bytes("b"));
  EXPECT_ERROR(rename_new(directory / "a", directory / "b"), ErrorCode::invalid_argument, "rename", "exists");
  EXPECT_EQ(as_text(read_file(directory / "b")), "b");
  rename_replacing(directory / "a", directory / "b");
  EXPECT_EQ(as_text(read_file(directory / "b")), "a");
  rename_new(directory / "b", directory / "c");
  EXPECT_EQ(as_text(read_file(directory / "c")), "a");
  sync_directory(directory.path());
}

TEST(MemorySourceTest, ReadingPastTheEndIsCorrupt) {
  const MemorySource source(as_bytes("1234"), "a buffer");
  Bytes read(2);
  source.read_at(2, read);
  EXPECT_EQ(as_text(read), "34");
  EXPECT_ERROR(source.read_at(3, read), ErrorCode::corrupt, "a buffer at byte 3");
  EXPECT_ERROR(source.read_at(UINT64_MAX, read), ErrorCode::corrupt, "a buffer");
}

}  // namespace
}  // namespace tessera
