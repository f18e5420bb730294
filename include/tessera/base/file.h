#pragma once
/// \file
/// Positioned file I/O. Every failure is an `Error(io)` (`not_found` where the file isn't there) that names the
/// operation, the file, the byte offset and the system's reason; a file that is there and should not be is
/// `Error(invalid_argument)`. Reads and writes are retried when the system does less
/// than asked; `read_at` past the end of the file is `Error(corrupt)` saying how many bytes there are.

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>

#include "tessera/base/bytes.h"

namespace tessera {

/// Bytes that can be read from any offset, by several threads at once.
class ByteSource {
 public:
  virtual ~ByteSource() = default;
  /// Fills `out` from `offset_bytes`. Throws `Error(corrupt)` if the source ends before `offset_bytes + out.size()`.
  virtual void read_at(std::uint64_t offset_bytes, MutableByteView out) const = 0;
  virtual std::uint64_t size_bytes() const = 0;
  /// How messages call it: the file's path, or a description.
  virtual const std::string& name() const = 0;
};

/// A source over bytes in memory, which must outlive it.
class MemorySource final : public ByteSource {
 public:
  MemorySource(ByteView bytes, std::string name) : bytes_(bytes), name_(std::move(name)) {}
  void read_at(std::uint64_t offset_bytes, MutableByteView out) const override;
  std::uint64_t size_bytes() const override { return bytes_.size(); }
  const std::string& name() const override { return name_; }

 private:
  ByteView bytes_;
  std::string name_;
};

/// An open file. Movable; closed on destruction. All members but the destructor and move may run on several threads.
class File final : public ByteSource {
 public:
  /// Opens a regular file for reading. A directory or a device is `Error(invalid_argument)`.
  static File open_read(const std::filesystem::path& path);
  /// Creates a file that must not exist, for reading and writing.
  static File create_new(const std::filesystem::path& path);

  File(File&& other) noexcept;
  File& operator=(File&& other) noexcept;
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File() override;

  void read_at(std::uint64_t offset_bytes, MutableByteView out) const override;
  std::uint64_t size_bytes() const override;
  const std::string& name() const override { return name_; }

  void write_at(std::uint64_t offset_bytes, ByteView bytes);
  /// Reserves `size_bytes` on the disk and sets the file's size, so that a full disk is known before data is written.
  void preallocate(std::uint64_t size_bytes);
  /// Asks the system to begin writing a range to disk, without waiting. A hint: failures are ignored.
  void start_writeback(std::uint64_t offset_bytes, std::uint64_t length_bytes) noexcept;
  /// Tells the system that a range will not be needed again in its cache. A hint.
  void drop_cache(std::uint64_t offset_bytes, std::uint64_t length_bytes) const noexcept;
  /// Blocks until data and metadata are on the disk.
  void sync();
  /// Closes, reporting errors that the destructor would swallow. The file can't be used afterwards.
  void close();

 private:
  File(int descriptor, std::string name) : descriptor_(descriptor), name_(std::move(name)) {}
  int descriptor_ = -1;
  std::string name_;
};

/// All bytes of a source.
Bytes read_all(const ByteSource& source);

/// Throws `Error(corrupt)` if a source is larger than `limit_bytes`.
void require_size_within(const ByteSource& source, std::uint64_t limit_bytes);

/// The whole file, which must not be larger than `limit_bytes` (`Error(corrupt)` otherwise).
Bytes read_file(const std::filesystem::path& path, std::uint64_t limit_bytes = UINT64_MAX);

/// Creates `path` with `bytes` and syncs it.
void write_new_file(const std::filesystem::path& path, ByteView bytes);

/// fsync of a directory: makes renames and creations inside it durable.
void sync_directory(const std::filesystem::path& path);

/// Atomic rename that replaces `to`.
void rename_replacing(const std::filesystem::path& from, const std::filesystem::path& to);

/// Atomic rename that fails with `Error(invalid_argument)` if `to` exists.
void rename_new(const std::filesystem::path& from, const std::filesystem::path& to);

}  // namespace tessera
