#pragma once
/// \file
/// A storage for a checkpoint: a flat set of named files, in the file system or in memory.
///
/// Laws, which one test suite checks for every implementation:
///   `open` reads the bytes that were written and synced
///   `create` makes a new file; a file that is open stays readable after it is removed
///   `rename` replaces atomically; `rename_new` replaces nothing
///   after `sync` has returned, the effects of earlier `create`, `rename` and `remove` survive a crash of the machine
///
/// Names are relative paths inside the storage ("__0_0.distcp", "shards/a"). All members are thread-safe. Errors name
/// the file: `Error(not_found)` if it does not exist, `Error(invalid_argument)` if `create` finds that it exists,
/// `Error(io)`.

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/base/bytes.h"
#include "tessera/base/file.h"

namespace tessera::checkpoint {

/// A file being written. All members are thread-safe.
class OutputFile {
 public:
  OutputFile() = default;
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;
  /// Closes the file. Without `finish`, written bytes may be lost.
  virtual ~OutputFile() = default;
  virtual void write_at(std::uint64_t offset_bytes, ByteView bytes) = 0;
  /// Hints that a range is complete, so that the storage may begin to make it durable.
  virtual void start_writeback(std::uint64_t /*offset_bytes*/, std::uint64_t /*length_bytes*/) {}
  /// Blocks until all written bytes are durable, then closes the file.
  virtual void finish() = 0;
};

class Storage {
 public:
  Storage() = default;
  Storage(const Storage&) = delete;
  Storage& operator=(const Storage&) = delete;
  virtual ~Storage() = default;

  /// Returns the name to use in messages: the directory's path.
  virtual const std::string& name() const = 0;
  /// Creates the storage if it does not exist. Every rank that writes calls it.
  virtual void prepare() = 0;
  /// Returns the names of all files, sorted; empty if the storage does not exist.
  virtual std::vector<std::string> list() const = 0;
  /// Returns the size of a file, or nothing if it does not exist. Throws `Error(invalid_argument)` if it is not a
  /// regular file.
  virtual std::optional<std::uint64_t> size_bytes(const std::string& name) const = 0;
  virtual std::shared_ptr<const ByteSource> open(const std::string& name) const = 0;
  /// Creates a file and reserves `size_bytes` for it if possible.
  virtual std::unique_ptr<OutputFile> create(const std::string& name, std::uint64_t size_bytes) = 0;
  /// Renames a file, replacing `to` if it exists.
  virtual void rename(const std::string& from, const std::string& to) = 0;
  /// Renames a file. Returns false, and changes nothing, if `to` exists. The storages below do so atomically; the
  /// default checks and renames in two steps.
  virtual bool rename_new(const std::string& from, const std::string& to) {
    if (size_bytes(to)) return false;
    rename(from, to);
    return true;
  }
  /// Removes a file. Does nothing if it does not exist.
  virtual void remove(const std::string& name) = 0;
  /// Blocks until the effects of `create`, `rename` and `remove` are durable.
  virtual void sync() = 0;

  /// Returns the name of a file to use in messages.
  std::string name_of(const std::string& file) const { return name().empty() ? file : name() + "/" + file; }
};

/// Returns a storage in a directory. `prepare` creates the directory and its parents.
std::shared_ptr<Storage> file_system_storage(std::filesystem::path directory);

/// Returns a storage in this process's memory. Its files exist as long as there is a reference to it. Ranks that are
/// threads may share it.
std::shared_ptr<Storage> memory_storage(std::string name = "memory");

using tessera::read_file;
using tessera::write_new_file;

/// Creates file `name` with contents `bytes` and makes the contents durable.
void write_new_file(Storage& storage, const std::string& name, ByteView bytes);

/// Reads an entire file. Throws `Error(corrupt)` if it is larger than `limit_bytes`.
Bytes read_file(const Storage& storage, const std::string& name, std::uint64_t limit_bytes = UINT64_MAX);

}  // namespace tessera::checkpoint
