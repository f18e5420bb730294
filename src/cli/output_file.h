#pragma once
// A file that a command writes, which appears complete or not at all.

#include <filesystem>
#include <optional>

#include "tessera/base/bytes.h"
#include "tessera/base/file.h"

namespace tessera::cli {

// A lock on a file, which ends with its process.
class FileLock {
 public:
  // Holds none if locks do not work or another process holds it, for which it waits if `waits`.
  explicit FileLock(const std::filesystem::path& path, bool waits = false);
  ~FileLock();
  FileLock(const FileLock&) = delete;
  FileLock& operator=(const FileLock&) = delete;
  explicit operator bool() const { return is_held_; }
  // Returns whether `path` still names the file.
  bool is_of(const std::filesystem::path& path) const;

 private:
  int descriptor_;
  bool is_held_;
};

// Writes to `<path>.<process>.partial`, locked while its process lives. The destructor removes that file unless it was
// committed. Law: a process renames or removes such a file only while it holds the lock of the file that the path
// names.
class OutputFile {
 public:
  // Removes the files that killed processes left for the same path. Throws Error(invalid_argument) if `path` exists,
  // unless `replaces`.
  explicit OutputFile(std::filesystem::path path, bool replaces = false);
  ~OutputFile();
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  void write(ByteView bytes);
  // Syncs the file and renames it.
  void commit();

 private:
  std::filesystem::path path_, temporary_;
  bool replaces_;
  File file_;
  std::optional<FileLock> lock_;
  std::uint64_t written_bytes_ = 0;
};

}  // namespace tessera::cli
