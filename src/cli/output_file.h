#pragma once
// A file that a command writes, which appears complete or not at all.

#include <filesystem>

#include "tessera/base/bytes.h"
#include "tessera/base/file.h"

namespace tessera::cli {

// A lock on a file, which ends with its process.
class FileLock {
 public:
  // Holds none if another process does or locks do not work.
  explicit FileLock(const std::filesystem::path& path);
  ~FileLock();
  FileLock(const FileLock&) = delete;
  FileLock& operator=(const FileLock&) = delete;
  explicit operator bool() const { return is_held_; }

 private:
  int descriptor_;
  bool is_held_;
};

// Writes to `<path>.<process>.partial`, locked while its process lives. The destructor removes that file unless it was
// committed.
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
  FileLock lock_;
  std::uint64_t written_bytes_ = 0;
};

}  // namespace tessera::cli
