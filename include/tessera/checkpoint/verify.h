#pragma once
/// \file
/// Whether every byte of a checkpoint is accounted for and every checksum is right.

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "tessera/base/cancellation.h"
#include "tessera/base/progress.h"

namespace tessera::checkpoint {

struct Problem {
  std::string what;  ///< one line that says it all: file, byte offset, tensor or object, found, expected
  // The same for programs:
  std::string file;                           ///< relative to the checkpoint; empty if it concerns none
  std::optional<std::uint64_t> offset_bytes;  ///< in that file
  std::string name;                           ///< tensor or object; empty if it concerns none
};

struct VerifyOptions {
  std::size_t jobs = 0;             ///< 0 for as many as there are processors
  std::size_t max_problems = 1000;  ///< further ones are counted only
  ProgressSink* progress = nullptr;
  const Cancellation* cancellation = nullptr;
};

struct VerifyReport {
  std::vector<Problem> problems;  ///< ordered by file and offset
  std::uint64_t problem_count = 0;
  std::uint64_t tensors = 0, chunks = 0, objects = 0, files = 0;
  std::uint64_t bytes_checked = 0;  ///< bytes read and compared with a checksum
  std::uint64_t bytes_without_checksum =
      0;  ///< bytes that the format has no checksum of (safetensors without a sidecar)
  bool has_sidecar = false;
  /// Files that nothing refers to, as saves leave them that were killed: no problem, and removed by the next save.
  std::vector<std::string> left_over;
  bool good() const { return problem_count == 0; }
};

/// Checks everything: sidecar, metadata, files missing or unknown, chunks against shapes (bounds, overlaps, holes),
/// stored ranges against files (bounds, overlaps, bytes that nothing refers to), each archive against the metadata,
/// every checksum, every object's pickle. Damage is reported, not thrown, also where the metadata itself can't be read.
/// Throws `Error` where there is no answer: not_found, unsupported, io, cancelled.
VerifyReport verify(const std::filesystem::path& path, const VerifyOptions& options = {});

}  // namespace tessera::checkpoint
