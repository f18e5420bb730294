#include "checkpoint/storage/directory_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

namespace tessera::checkpoint {
namespace {

int open_directory(const std::filesystem::path& path) {
  return ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
}

}  // namespace

DirectoryLock::~DirectoryLock() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

DirectoryLock DirectoryLock::wait(const std::filesystem::path& path) {
  DirectoryLock lock(open_directory(path));
  if (lock) ::flock(lock.descriptor_, LOCK_EX);
  return lock;
}

DirectoryLock DirectoryLock::try_lock(const std::filesystem::path& path) {
  DirectoryLock lock(open_directory(path));
  return lock && ::flock(lock.descriptor_, LOCK_EX | LOCK_NB) == 0 ? std::move(lock) : DirectoryLock();
}

}  // namespace tessera::checkpoint
