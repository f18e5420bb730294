#include "cli/output_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
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
    if (const FileLock lock(it->path()); lock && lock.is_of(it->path())) ::unlink(it->path().c_str());
  }
}

fs::path temporary_for(fs::path path) {
  remove_leftovers(path);
  path += fmt::format(".{}{}", ::getpid(), kTemporaryEnd);
  return path;
}

}  // namespace

FileLock::FileLock(const fs::path& path, bool waits)
    : descriptor_(::open(path.c_str(), O_RDWR | O_NONBLOCK | O_CLOEXEC | O_NOFOLLOW)),
      is_held_(descriptor_ >= 0 && ::flock(descriptor_, LOCK_EX | (waits ? 0 : LOCK_NB)) == 0) {}

FileLock::~FileLock() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

bool FileLock::is_of(const fs::path& path) const {
  struct stat locked {};
  struct stat named {};
  return descriptor_ >= 0 && ::fstat(descriptor_, &locked) == 0 && ::lstat(path.c_str(), &named) == 0 &&
         locked.st_dev == named.st_dev && locked.st_ino == named.st_ino;
}

OutputFile::OutputFile(fs::path path, bool replaces)
    : path_(checked(std::move(path), replaces)),
      temporary_(temporary_for(path_)),
      replaces_(replaces),
      file_(File::create_new(temporary_)) {
  // Until it is locked, a process that removes leftovers may take it for one.
  for (lock_.emplace(temporary_, true); !lock_->is_of(temporary_); lock_.emplace(temporary_, true)) {
    file_ = File::create_new(temporary_);
  }
}

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
