#include "cli/output_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <string>
#include <string_view>
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

constexpr std::string_view kTemporaryEnd = ".partial";

bool is_temporary_of(std::string_view path, std::string_view name) {
  if (!name.starts_with(path) || !name.ends_with(kTemporaryEnd)) return false;
  name.remove_prefix(path.size());
  name.remove_suffix(std::min(name.size(), kTemporaryEnd.size()));
  return name.size() > 1 && name[0] == '.' && name.find_first_not_of("0123456789", 1) == std::string_view::npos;
}

void remove_leftovers(const fs::path& path) {
  std::error_code error;
  for (fs::directory_iterator it(path.parent_path() / ".", error), end; !error && it != end; it.increment(error)) {
    if (!is_temporary_of(path.filename().string(), it->path().filename().string())) continue;
    if (const FileLock lock(it->path()); lock) ::unlink(it->path().c_str());
  }
}

fs::path temporary_for(fs::path path) {
  remove_leftovers(path);
  path += fmt::format(".{}{}", ::getpid(), kTemporaryEnd);
  return path;
}

}  // namespace

FileLock::FileLock(const fs::path& path)
    : descriptor_(::open(path.c_str(), O_RDWR | O_NONBLOCK | O_CLOEXEC | O_NOFOLLOW)),
      is_held_(descriptor_ >= 0 && ::flock(descriptor_, LOCK_EX | LOCK_NB) == 0) {}

FileLock::~FileLock() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

OutputFile::OutputFile(fs::path path, bool replaces)
    : path_(checked(std::move(path), replaces)),
      temporary_(temporary_for(path_)),
      replaces_(replaces),
      file_(File::create_new(temporary_)),
      lock_(temporary_) {}

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
