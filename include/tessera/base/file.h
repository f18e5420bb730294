#pragma once
/// \file
/// Positioned file I/O.
///
/// A failure throws `Error(io)`, or `Error(not_found)` if the file does not exist, naming the operation, the file, the
/// byte offset and the system's reason. Functions that create a file throw `Error(invalid_argument)` if it exists.
/// Short reads and writes are retried. `read_at` past the end of the file throws `Error(corrupt)` with the number of
/// bytes that the file has.

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>

#include "tessera/base/bytes.h"

namespace tessera {

/// Bytes that several threads can read at once, from any offset.
class ByteSource {
 public:
  virtual ~ByteSource() = default;
  /// Fills `out` from `offset_bytes`. Throws `Error(corrupt)` if the source ends before `offset_bytes + out.size()`.
  virtual void read_at(std::uint64_t offset_bytes, MutableByteView out) const = 0;
  /// Same as `read_at`, for one of many reads with gaps between them. A source that compares bytes with checksums reads
  /// no further bytes for it.
  virtual void read_scattered_at(std::uint64_t offset_bytes, MutableByteView out) const { read_at(offset_bytes, out); }
  /// Returns whether `read_at` compares every byte that it returns with a checksum.
  virtual bool compares_every_byte() const { return false; }
  virtual std::uint64_t size_bytes() const = 0;
  /// Returns the name for messages: the file's path, or a description.
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

/// An open file. Movable; closed on destruction. Several threads may call all members except the destructor and the
/// moves.
class File final : public ByteSource {
 public:
  /// Opens a regular file for reading. Throws `Error(invalid_argument)` for a directory or a device.
  static File open_read(const std::filesystem::path& path);
  /// Creates a file for reading and writing. The file must not exist.
  static File create_new(const std::filesystem::path& path);

  File(File&& other) noexcept;
  File& operator=(File&& other) noexcept;
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File() override;

  void read_at(std::uint64_t offset_bytes, MutableByteView out) const override;
  std::uint64_t size_bytes() const override;
  const std::string& name() const override { return name_; }

  /// Writes all of `bytes` at `offset_bytes`.
  void write_at(std::uint64_t offset_bytes, ByteView bytes);
  /// Reserves `size_bytes` on the disk and sets the file's size, so that a full disk fails before data is written.
  void preallocate(std::uint64_t size_bytes);
  /// Asks the system to begin writing a range to disk, without waiting. A hint: failures are ignored.
  void start_writeback(std::uint64_t offset_bytes, std::uint64_t length_bytes) noexcept;
  /// Blocks until data and metadata are on the disk.
  void sync();
  /// Closes the file, reporting errors that the destructor would ignore. The file cannot be used afterwards.
  void close();

 private:
  File(int descriptor, std::string name) : descriptor_(descriptor), name_(std::move(name)) {}
  int descriptor_ = -1;
  std::string name_;
};

/// Returns all bytes of a source.
Bytes read_all(const ByteSource& source);

/// Throws `Error(corrupt)` if a source is larger than `limit_bytes`.
void require_size_within(const ByteSource& source, std::uint64_t limit_bytes);

/// Returns the contents of a file. Throws `Error(corrupt)` if it is larger than `limit_bytes`.
Bytes read_file(const std::filesystem::path& path, std::uint64_t limit_bytes = UINT64_MAX);

/// Creates `path` with `bytes` and syncs it.
void write_new_file(const std::filesystem::path& path, ByteView bytes);

/// Calls fsync on a directory, which makes renames and creations inside it durable.
void sync_directory(const std::filesystem::path& path);

/// Renames atomically, replacing `to`.
void rename_replacing(const std::filesystem::path& from, const std::filesystem::path& to);

/// Renames atomically. Throws `Error(invalid_argument)` if `to` exists.
void rename_new(const std::filesystem::path& from, const std::filesystem::path& to);

}  // namespace tessera
