#pragma once
// A lock on a directory, which ends with its process.

#include <filesystem>
#include <utility>

namespace tessera::checkpoint {

// Holds a descriptor of a directory, locked with flock if the file system supports it.
class DirectoryLock {
 public:
  DirectoryLock() = default;
  DirectoryLock(DirectoryLock&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}
  DirectoryLock& operator=(DirectoryLock&& other) noexcept {
    std::swap(descriptor_, other.descriptor_);
    return *this;
  }
  DirectoryLock(const DirectoryLock&) = delete;
  DirectoryLock& operator=(const DirectoryLock&) = delete;
  ~DirectoryLock();

  // Waits for the lock. Where locks do not work, holds none.
  static DirectoryLock wait(const std::filesystem::path& path);
  // Returns a lock that converts to false if another process holds it, `path` is not a directory, or locks do not work.
  static DirectoryLock try_lock(const std::filesystem::path& path);
  explicit operator bool() const { return descriptor_ >= 0; }

 private:
  explicit DirectoryLock(int descriptor) : descriptor_(descriptor) {}
  int descriptor_ = -1;
};

}  // namespace tessera::checkpoint
