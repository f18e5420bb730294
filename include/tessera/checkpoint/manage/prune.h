#pragma once
/// \file
/// Removal of old steps from a run's directory (see run_directory.h).

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "tessera/base/cancellation.h"

namespace tessera::checkpoint {

struct PrunedEntry {
  std::string name;
  /// Why it is removed: "old", "incomplete", "unfinished", or "removed before" for the rest of an interrupted removal.
  std::string why;
  std::uint64_t size_bytes = 0;  ///< of its files
};

struct KeptEntry {
  std::string name;
  std::string why;  ///< one line: "newest", "a multiple of 1000", "'best' refers to it", ...
};

struct PruneOptions {
  std::size_t keep = 1;               ///< how many of the newest complete steps are kept, at least 1
  std::optional<std::int64_t> every;  ///< if set, at least 1: steps whose number is a multiple of it are kept too
  /// Whether to remove incomplete steps that are older than the newest complete one, and the staging folders that
  /// interrupted conversions left for such steps.
  bool incomplete = false;
  bool dry_run = false;  ///< remove nothing, and report what would be removed
  /// Called after each removal; with `dry_run`, for each entry that would be removed.
  std::function<void(const PrunedEntry&)> removed = nullptr;
  const Cancellation* cancellation = nullptr;
};

struct PruneReport {
  std::vector<PrunedEntry> removed;
  std::vector<KeptEntry> kept;
  std::vector<std::string> failed;  ///< messages: what could not be removed
  std::uint64_t freed_bytes = 0;
};

/// Removes old steps. These are kept:
/// - the newest `keep` complete steps, and so the newest complete one, whatever the options
/// - multiples of `every`
/// - a step that a symbolic link in the directory refers to, or that a file `latest` (DeepSpeed) or
///   `latest_checkpointed_iteration.txt` (Megatron) names
/// - incomplete steps that are newer than the newest complete one or have another unit, which a job may be writing, and
///   older ones unless `incomplete`
/// - entries that a process of tessera writes to, symbolic links, and all that is not a checkpoint of a known format
///
/// Each removal is a remove_step(), oldest first. If the process is killed at any instant, every step is complete or
/// gone, and the next call deletes the rest. Throws `Error(invalid_argument)` for invalid options, and if the complete
/// steps have numbers of different units; otherwise as list_run.
PruneReport prune(const std::filesystem::path& directory, const PruneOptions& options);

}  // namespace tessera::checkpoint
