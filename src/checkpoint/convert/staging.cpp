#include "checkpoint/convert/staging.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>

#include "tessera/base/error.h"
#include "tessera/base/file.h"

namespace tessera::checkpoint {
namespace fs = std::filesystem;
namespace {

constexpr std::string_view kSuffix = ".partial";

std::string prefix_of(const fs::path& destination) {
  return fmt::format(".{}.tessera-", destination.filename().string());
}

// Returns the absolute path without a trailing slash, so that filename() is not empty.
fs::path normal(const fs::path& path) {
  const fs::path absolute = fs::absolute(path).lexically_normal();
  return absolute.has_filename() ? absolute : absolute.parent_path();
}

void check_is_new(const fs::path& destination) {
  std::error_code error;
  if (fs::exists(fs::symlink_status(destination, error))) {
    fail(ErrorCode::invalid_argument, "{}: the destination already exists, expected a new path", destination.string());
  }
}

int open_directory(const fs::path& path) {
  return ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
}

}  // namespace

void Staging::check_destination(const fs::path& destination, const fs::path& source) {
  if (destination.empty()) fail(ErrorCode::invalid_argument, "the destination has no name");
  std::error_code error;
  const fs::path target = normal(destination);
  const fs::path real_source = fs::weakly_canonical(source, error);
  const fs::path real_target = fs::weakly_canonical(target, error);
  if (!error && real_source == real_target) {
    fail(ErrorCode::invalid_argument, "{}: the destination is the source, expected another path", destination.string());
  }
  check_is_new(target);
  for (fs::path above = real_target.parent_path(); above.has_relative_path(); above = above.parent_path()) {
    if (above == real_source) {
      fail(ErrorCode::invalid_argument, "{}: the destination is within the source, expected a path outside of it",
           destination.string());
    }
  }
  if (!fs::is_directory(target.parent_path(), error)) {
    fail(ErrorCode::not_found, "{}: the parent directory {} does not exist", destination.string(),
         target.parent_path().string());
  }
}

Staging::Staging(const fs::path& destination, const fs::path& source)
    : destination_(normal(destination)), parent_(destination_.parent_path()) {
  check_destination(destination, source);
  remove_leftovers();
  static std::atomic<unsigned> counter = 0;
  folder_ = parent_ / fmt::format("{}{}-{}{}", prefix_of(destination_), ::getpid(), counter++, kSuffix);
  if (::mkdir(folder_.c_str(), 0777) != 0) {
    fail(ErrorCode::io, "create {} next to the destination: {}", folder_.string(), std::strerror(errno));
  }
  lock_ = open_directory(folder_);
  if (lock_ >= 0) ::flock(lock_, LOCK_EX | LOCK_NB);  // if locks do not work, leftovers are never removed
}

Staging::~Staging() {
  std::error_code ignored;
  if (!folder_.empty()) fs::remove_all(folder_, ignored);
  if (lock_ >= 0) ::close(lock_);
}

void Staging::remove_leftovers() const {
  std::error_code error;
  const std::string prefix = prefix_of(destination_);
  for (fs::directory_iterator it(parent_, error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    if (!name.starts_with(prefix) || !name.ends_with(kSuffix)) continue;
    const int descriptor = open_directory(it->path());
    if (descriptor < 0) continue;
    std::error_code ignored;
    if (::flock(descriptor, LOCK_EX | LOCK_NB) == 0) fs::remove_all(it->path(), ignored);
    ::close(descriptor);
  }
}

void Staging::commit_folder() {
  sync_directory(folder_);
  rename_new(folder_, destination_);
  folder_.clear();
  sync_parent();
}

void Staging::commit_file(const fs::path& file, const fs::path& companion, const std::string& suffix) {
  // Two conversions to one destination must not mix their files. Where locks do not work, the last check before the
  // renames leaves an instant in which they could.
  const int parent_lock = open_directory(parent_);
  if (parent_lock >= 0) ::flock(parent_lock, LOCK_EX);
  try {
    check_is_new(destination_);
    if (!companion.empty()) rename_replacing(folder_ / companion, fs::path(destination_.string() + suffix));
    rename_new(folder_ / file, destination_);
  } catch (...) {
    if (parent_lock >= 0) ::close(parent_lock);
    throw;
  }
  if (parent_lock >= 0) ::close(parent_lock);
  sync_parent();
}

void Staging::sync_parent() const {
  try {
    sync_directory(parent_);
  } catch (const Error& error) {
    fail(error.code(), "{}; {} is there and complete, but may be lost if the machine crashes now", error.what(),
         destination_.string());
  }
}

}  // namespace tessera::checkpoint
