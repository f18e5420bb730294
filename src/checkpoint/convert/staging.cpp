#include "checkpoint/convert/staging.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "checkpoint/source/foreign.h"
#include "checkpoint/source/source.h"
#include "tessera/base/error.h"
#include "tessera/base/file.h"
#include "tessera/checkpoint/internal/file_names.h"

namespace tessera::checkpoint {
namespace fs = std::filesystem;
namespace {

// Returns the absolute path without a trailing slash, so that filename() is not empty.
fs::path normal(const fs::path& path) {
  std::error_code error;
  const fs::path absolute = fs::absolute(path, error).lexically_normal();
  if (error) fail(ErrorCode::io, "find the absolute path of {}: {}", path.string(), error.message());
  return absolute.has_filename() ? absolute : absolute.parent_path();
}

bool is_there(const fs::path& path) {
  std::error_code error;
  return fs::exists(fs::symlink_status(path, error));
}

void check_is_new(const fs::path& destination) {
  if (is_there(destination)) {
    fail(ErrorCode::invalid_argument, "{}: the destination already exists, expected a new path", destination.string());
  }
}

// A directory of anything else must not be lost by a mistaken path.
void check_may_replace(const fs::path& destination) {
  std::error_code error;
  const fs::file_status status = fs::symlink_status(destination, error);
  if (!fs::exists(status) || fs::is_regular_file(status)) return;
  if (!fs::is_directory(status)) {
    fail(ErrorCode::invalid_argument,
         "{}: found a special file or a symbolic link, expected a file or a directory to replace",
         destination.string());
  }
  const bool is_checkpoint = directory_kind(*file_system_storage(destination)).has_value();
  bool has_directory = false;
  for (fs::directory_iterator it(destination, error), end; !error && it != end; it.increment(error)) {
    std::error_code failed;
    has_directory = has_directory || (!it->is_symlink(failed) && it->is_directory(failed));
    if (failed && failed != std::errc::no_such_file_or_directory) {
      fail(ErrorCode::io, "stat {}: {}", it->path().string(), failed.message());
    }
  }
  if (error) fail(ErrorCode::io, "list {}: {}", destination.string(), error.message());
  if (is_checkpoint && !has_directory) return;
  fail(ErrorCode::invalid_argument, "{}: found a directory that {}, expected that of a checkpoint to replace",
       destination.string(), is_checkpoint ? "has directories in it" : "is no checkpoint");
}

void exchange(const fs::path& a, const fs::path& b) {
  if (::renameat2(AT_FDCWD, a.c_str(), AT_FDCWD, b.c_str(), RENAME_EXCHANGE) == 0) return;
  fail(ErrorCode::io, "exchange {} and {}: {}; remove the destination first", a.string(), b.string(),
       std::strerror(errno));
}

}  // namespace

void Staging::check_destination(const fs::path& destination, const fs::path& source, Existing existing) {
  if (destination.empty()) fail(ErrorCode::invalid_argument, "the destination is empty, expected a path");
  refuse_no_path(destination);
  std::error_code error;
  const fs::path target = normal(destination);
  const fs::path real_source = fs::weakly_canonical(source, error);
  const fs::path real_target = fs::weakly_canonical(target, error);
  if (!error && real_source == real_target) {
    fail(ErrorCode::invalid_argument, "{}: the destination is the source, expected another path", destination.string());
  }
  if (existing == Existing::refuse) check_is_new(target);
  for (fs::path above = real_source.parent_path(); above.has_relative_path(); above = above.parent_path()) {
    if (above == real_target) {
      fail(ErrorCode::invalid_argument, "{}: the source is within the destination, expected a path outside of it",
           destination.string());
    }
  }
  if (existing == Existing::replace) check_may_replace(target);
  for (fs::path above = real_target.parent_path(); above.has_relative_path(); above = above.parent_path()) {
    if (above == real_source) {
      fail(ErrorCode::invalid_argument, "{}: the destination is within the source, expected a path outside of it",
           destination.string());
    }
  }
  if (!fs::is_directory(target.parent_path(), error)) {
    fail(ErrorCode::not_found, "{}: found no directory {}, expected the destination's parent; create it",
         destination.string(), target.parent_path().string());
  }
}

Staging::Staging(const fs::path& destination, const fs::path& source, Existing existing)
    : destination_(normal(destination)), parent_(destination_.parent_path()), existing_(existing) {
  check_destination(destination, source, existing);
  remove_leftovers();
  static std::atomic<unsigned> counter = 0;
  folder_ = parent_ / staging_name({destination_.filename().string(), ::getpid(), counter++});
  if (::mkdir(folder_.c_str(), 0777) != 0) {
    fail(ErrorCode::io, "create {} next to the destination: {}", folder_.string(), std::strerror(errno));
  }
  // Whoever finds out whether it is locked holds the lock for an instant. If locks do not work, leftovers are never
  // removed.
  lock_ = DirectoryLock::wait(folder_);
}

Staging::~Staging() {
  std::error_code ignored;
  if (!folder_.empty()) fs::remove_all(folder_, ignored);
}

void Staging::remove_leftovers() const {
  std::error_code error;
  for (fs::directory_iterator it(parent_, error), end; !error && it != end; it.increment(error)) {
    const auto staging = parse_staging_name(it->path().filename().string());
    if (!staging || staging->name != destination_.filename()) continue;
    std::error_code ignored;
    if (const DirectoryLock lock = DirectoryLock::try_lock(it->path())) fs::remove_all(it->path(), ignored);
  }
}

void Staging::commit_folder() {
  sync_directory(folder_);
  if (existing_ == Existing::replace && is_there(destination_)) {
    std::error_code error;
    const bool is_directory = fs::is_directory(destination_, error);
    if (error) fail(ErrorCode::io, "stat {}: {}", destination_.string(), error.message());
    if (!is_directory) {
      fail(ErrorCode::invalid_argument, "{}: found a file, expected a directory to replace", destination_.string());
    }
    exchange(folder_, destination_);
  } else {
    rename_new(folder_, destination_);
    folder_.clear();
  }
  sync_parent();
}

void Staging::commit_file(const fs::path& file, const fs::path& companion, const std::string& suffix) {
  // Two conversions to one destination must not mix their files. Where locks do not work, the last check before the
  // renames leaves an instant in which they could.
  const DirectoryLock parent_lock = DirectoryLock::wait(parent_);
  const fs::path companion_path(destination_.string() + suffix);
  const bool replaces = existing_ == Existing::replace && is_there(destination_);
  if (!replaces) check_is_new(destination_);
  if (replaces || companion.empty()) {  // a companion that is there is none of the new file
    std::error_code error;
    if (fs::remove(companion_path, error)) sync_directory(parent_);
    if (error) fail(ErrorCode::io, "remove {}: {}", companion_path.string(), error.message());
  }
  if (replaces) {
    rename_replacing(folder_ / file, destination_);
    sync_directory(parent_);
    if (!companion.empty()) rename_replacing(folder_ / companion, companion_path);
  } else {
    if (!companion.empty()) rename_replacing(folder_ / companion, companion_path);
    rename_new(folder_ / file, destination_);
  }
  sync_parent();
}

void Staging::sync_parent() const {
  try {
    sync_directory(parent_);
  } catch (const Error& error) {
    throw Error(error.code(), fmt::format("{}; {} is there and complete, but may be lost if the machine crashes now",
                                          error.what(), destination_.string()));
  }
}

}  // namespace tessera::checkpoint
