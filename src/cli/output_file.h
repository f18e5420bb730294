#pragma once
// A file that a command writes, which appears complete or not at all.

#include <filesystem>

#include "tessera/base/bytes.h"
#include "tessera/base/file.h"

namespace tessera::cli {

// Writes to `<path>.<process>.partial`. The destructor removes that file unless it was committed.
class OutputFile {
 public:
  // Throws Error(invalid_argument) if `path` exists, unless `replaces`.
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
  std::uint64_t written_bytes_ = 0;
};

}  // namespace tessera::cli
