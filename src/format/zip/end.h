#pragma once
/// \file
/// The records at the end of an archive, which locate its directory.

#include <cstdint>

#include "format/zip/window.h"

namespace tessera::zip {

/// Positions are relative to the archive. Law: the directory ends where the first of the end records begins, and they
/// follow one another to the end of the archive.
struct End {
  std::uint64_t entries = 0;
  std::uint64_t directory_at = 0;
  std::uint64_t directory_bytes = 0;
  bool has_zip64 = false;
  std::uint16_t zip64_made_by = 0;
};

/// Reads and checks the end records. A directory has at most 1 GiB and enough bytes for its number of entries.
End read_end(Window& window);

/// The versions that a zip tool may write ("version needed", the low byte of "made by").
inline constexpr std::uint16_t kLeastVersion = 10, kMostVersion = 63;
inline bool is_version(std::uint16_t version) { return version >= kLeastVersion && version <= kMostVersion; }

}  // namespace tessera::zip
