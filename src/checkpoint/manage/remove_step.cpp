#include <unistd.h>

#include <atomic>

#include "tessera/base/error.h"
#include "tessera/base/file.h"
#include "tessera/checkpoint/internal/file_names.h"
#include "tessera/checkpoint/manage/run_directory.h"
#include "tessera/checkpoint/sidecar.h"

namespace tessera::checkpoint {
namespace fs = std::filesystem;
namespace {

// Renames an entry to a name that marks it as removed, and returns that.
fs::path hide(const fs::path& directory, const std::string& name) {
  static std::atomic<std::int64_t> counter = 0;
  for (;;) {
    fs::path hidden = directory / removed_name({name, ::getpid(), counter++});
    std::error_code ignored;
    if (fs::exists(fs::symlink_status(hidden, ignored))) continue;  // of an earlier process with this number
    rename_new(directory / name, hidden);
    return hidden;
  }
}

// Two processes may delete the same tree at once: each finds that entries are gone.
void delete_tree(const fs::path& path) {
  constexpr int kAttempts = 100;
  std::error_code error;
  for (int i = 0; i < kAttempts; ++i) {
    fs::remove_all(path, error);
    if (!error) return;
    if (error != std::errc::no_such_file_or_directory && error != std::errc::directory_not_empty) break;
  }
  fail(ErrorCode::io, "remove {}: {}", path.string(), error.message());
}

}  // namespace

void remove_step(const fs::path& directory, const std::string& name) {
  std::error_code error;
  if (!fs::exists(fs::symlink_status(directory / name, error))) {
    fail(ErrorCode::not_found, "remove {}: no such file or directory", (directory / name).string());
  }
  // The sidecar first: without it, the file is complete; alone, it would stay for ever.
  const std::string sidecar = name + std::string(kSidecarFileName);
  std::vector<fs::path> hidden;
  if (fs::is_regular_file(fs::symlink_status(directory / sidecar, error))) hidden.push_back(hide(directory, sidecar));
  hidden.push_back(hide(directory, name));
  sync_directory(directory);
  for (const fs::path& path : hidden) delete_tree(path);
}

void finish_removals(const fs::path& directory) {
  std::error_code error;
  std::vector<fs::path> found;
  for (fs::directory_iterator it(directory, error), end; !error && it != end; it.increment(error)) {
    if (parse_removed_name(it->path().filename().string())) found.push_back(it->path());
  }
  if (error && error != std::errc::no_such_file_or_directory) {
    fail(ErrorCode::io, "list {}: {}", directory.string(), error.message());
  }
  for (const fs::path& path : found) delete_tree(path);
}

}  // namespace tessera::checkpoint
