#include "cli/output_file.h"

#include <fmt/format.h>
#include <unistd.h>

#include <system_error>
#include <utility>

#include "tessera/base/error.h"

namespace tessera::cli {
namespace fs = std::filesystem;
namespace {

fs::path checked(fs::path path, bool replaces) {
  std::error_code ignored;
  if (!replaces && fs::exists(fs::symlink_status(path, ignored))) {
    fail(ErrorCode::invalid_argument, "write {}: the file exists, expected a new path; name another one",
         path.string());
  }
  return path;
}

fs::path temporary_for(fs::path path) {
  path += fmt::format(".{}.partial", ::getpid());
  return path;
}

}  // namespace

OutputFile::OutputFile(fs::path path, bool replaces)
    : path_(checked(std::move(path), replaces)),
      temporary_(temporary_for(path_)),
      replaces_(replaces),
      file_(File::create_new(temporary_)) {}

OutputFile::~OutputFile() {
  std::error_code ignored;
  if (!temporary_.empty()) fs::remove(temporary_, ignored);
}

void OutputFile::write(ByteView bytes) {
  file_.write_at(written_bytes_, bytes);
  written_bytes_ += bytes.size();
}

void OutputFile::commit() {
  file_.sync();
  file_.close();
  if (replaces_) {
    rename_replacing(temporary_, path_);
  } else {
    rename_new(temporary_, path_);
  }
  temporary_.clear();
}

}  // namespace tessera::cli
