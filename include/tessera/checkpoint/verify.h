#pragma once
/// \file
/// Verification of a checkpoint: every byte must be accounted for and every checksum must match.

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "tessera/base/cancellation.h"
#include "tessera/base/progress.h"

namespace tessera::checkpoint {

struct Problem {
  std::string what;  ///< one line for users: file, byte offset, tensor or object, found, expected
  // The parts of `what`, for programs:
  std::string file;                           ///< relative to the checkpoint; empty if the problem concerns no file
  std::optional<std::uint64_t> offset_bytes;  ///< in that file
  std::string name;                           ///< of the tensor or object; empty if the problem concerns none
};

struct VerifyOptions {
  std::size_t jobs = 0;             ///< threads; 0: one per processor, at least 4, at most 16
  std::size_t max_problems = 1000;  ///< problems to list; further ones are only counted
  ProgressSink* progress = nullptr;
  const Cancellation* cancellation = nullptr;
};

struct VerifyReport {
  std::vector<Problem> problems;  ///< sorted by file and offset
  std::uint64_t problem_count = 0;
  std::uint64_t tensors = 0, chunks = 0, objects = 0, files = 0;
  std::uint64_t bytes_checked = 0;  ///< read and compared with a checksum
  /// Bytes without a checksum: safetensors without a sidecar.
  std::uint64_t bytes_without_checksum = 0;
  bool has_sidecar = false;
  bool sidecar_agrees = false;  ///< whether every file that the sidecar lists matches it
  /// Unreferenced files that a killed save leaves. They are not a problem, and the next save removes them.
  std::vector<std::string> left_over;
  /// Files in the directory that are not part of the checkpoint, such as `config.json`. They are not a problem.
  std::vector<std::string> other_files;
  /// Warnings from opening the checkpoint (see `Checkpoint::warnings`). They are not a problem.
  std::vector<std::string> warnings;
  bool good() const { return problem_count == 0; }
};

/// Checks everything: the sidecar; the metadata; missing files; chunks against shapes (bounds, overlaps, holes); stored
/// ranges against files (bounds, overlaps, unreferenced bytes); each archive against the metadata; every checksum; and
/// every object's pickle. Damage is reported and not thrown, even if the metadata is unreadable. Throws `Error` if the
/// check cannot be made: not_found, unsupported, io, cancelled.
VerifyReport verify(const std::filesystem::path& path, const VerifyOptions& options = {});

}  // namespace tessera::checkpoint
