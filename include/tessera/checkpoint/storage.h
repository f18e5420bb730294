#pragma once
/// \file
/// Where a checkpoint's files are: a flat set of named files. The file system is one; memory another.
///
/// Laws, which every implementation passes as one suite of tests:
///   what was written and synced is what `open` reads
///   `create` makes a file that wasn't there; a file that others have open stays readable though it is removed
///   `rename` replaces, and nobody sees a state between before and after
///   what was created, renamed or removed before `sync` outlives a crash of the machine
///
/// Names are relative paths that don't leave the place ("__0_0.distcp", "shards/a"). All members may be called by
/// several threads at once. Errors are `Error(io)`, `Error(not_found)` for a file that isn't there and
/// `Error(invalid_argument)` for one that is, all of which name the file.

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/base/bytes.h"
#include "tessera/base/file.h"

namespace tessera::checkpoint {

/// A file that is being written. All members may be called by several threads at once.
class OutputFile {
 public:
  OutputFile() = default;
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;
  /// Closes it; what was not synced may be lost.
  virtual ~OutputFile() = default;
  virtual void write_at(std::uint64_t offset_bytes, ByteView bytes) = 0;
  /// Says that a range is complete, so that the storage may begin to make it durable. A hint.
  virtual void start_writeback(std::uint64_t /*offset_bytes*/, std::uint64_t /*length_bytes*/) {}
  /// Blocks until all that was written is durable; then closes it.
  virtual void finish() = 0;
};

class Storage {
 public:
  Storage() = default;
  Storage(const Storage&) = delete;
  Storage& operator=(const Storage&) = delete;
  virtual ~Storage() = default;

  /// How messages call it: the directory's path.
  virtual const std::string& name() const = 0;
  /// Makes the place if it isn't there. Every rank that writes calls it.
  virtual void prepare() = 0;
  /// The files that are there, sorted; none if the place isn't there.
  virtual std::vector<std::string> list() const = 0;
  /// Nothing if there is no such file; `Error(invalid_argument)` for what is none.
  virtual std::optional<std::uint64_t> size_bytes(const std::string& name) const = 0;
  virtual std::shared_ptr<const ByteSource> open(const std::string& name) const = 0;
  /// A new file, for which `size_bytes` are reserved where that can be done.
  virtual std::unique_ptr<OutputFile> create(const std::string& name, std::uint64_t size_bytes) = 0;
  virtual void rename(const std::string& from, const std::string& to) = 0;
  /// Does nothing if there is no such file.
  virtual void remove(const std::string& name) = 0;
  /// Blocks until what `create`, `rename` and `remove` did is durable.
  virtual void sync() = 0;

  /// How messages call a file in it.
  std::string name_of(const std::string& file) const { return name().empty() ? file : name() + "/" + file; }
};

/// A directory. `prepare` makes it, and those above it.
std::shared_ptr<Storage> file_system_storage(std::filesystem::path directory);

/// In this process's memory, for as long as there is a reference; shared by its ranks if they are threads.
std::shared_ptr<Storage> memory_storage(std::string name = "memory");

using tessera::read_file;
using tessera::write_new_file;

/// Creates `name` with `bytes` and makes it durable.
void write_new_file(Storage& storage, const std::string& name, ByteView bytes);

/// The whole of a file, which must not be larger than `limit_bytes` (`Error(corrupt)` otherwise).
Bytes read_file(const Storage& storage, const std::string& name, std::uint64_t limit_bytes = UINT64_MAX);

}  // namespace tessera::checkpoint
