#pragma once
/// \file
/// A slice of a source that contains an archive, read in few large pieces. Offsets are relative to the slice. A slice
/// of up to 64 KiB is read completely, once.

#include <cstdint>
#include <string_view>

#include "tessera/base/error.h"
#include "tessera/base/file.h"

namespace tessera::zip {

class Window {
 public:
  /// Throws `Error(corrupt)` if the slice is not inside of the source. `source` must outlive the window.
  Window(const ByteSource& source, std::uint64_t offset_bytes, std::uint64_t length_bytes);

  std::uint64_t length() const { return length_; }
  const std::string& name() const { return source_.name(); }
  /// Converts a position in the slice to one in the source, for messages and entries.
  std::uint64_t in_source(std::uint64_t at) const { return offset_ + at; }
  /// Returns `size` bytes at `at`, valid until the next call. Throws `Error(corrupt)`, reporting that `what` ends past
  /// the archive, if there are fewer.
  ByteView view(std::uint64_t at, std::uint64_t size, std::string_view what);
  /// Fills `out` from `at`, which must be inside of the archive.
  void read(std::uint64_t at, MutableByteView out);
  /// As `view`, but keeps the bytes for later calls inside of them (the archive's end).
  ByteView view_tail(std::uint64_t size);

  /// Throws `Error(corrupt)` with the file and `at` as a byte of the file.
  template <typename... Args>
  [[noreturn]] void corrupt(std::uint64_t at, fmt::format_string<Args...> format, Args&&... args) const {
    fail(ErrorCode::corrupt, "{}: zip, byte {}: {}", name(), in_source(at),
         fmt::format(format, std::forward<Args>(args)...));
  }
  void require_equal(std::uint64_t at, std::string_view what, std::uint64_t found, std::uint64_t expected) const {
    if (found != expected) corrupt(at, "{} is {}, expected {}", what, found, expected);
  }

 private:
  struct Piece {
    std::uint64_t begin = 0;
    Bytes bytes;
  };
  const ByteSource& source_;
  std::uint64_t offset_, length_;
  Piece tail_, piece_;
};

}  // namespace tessera::zip
