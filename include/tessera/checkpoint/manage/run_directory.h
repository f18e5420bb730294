#pragma once
/// \file
/// The directory of a run: one checkpoint for each saved step, and what interrupted saves and removals left.
///
/// A step is a directory, or a file of torch.save or safetensors, whose name has its number in a form that trainers
/// write: `step-100`, `step_100`, `checkpoint-100`, `ckpt-100`, `iter_0000100`, `global_step100`, `epoch=3-step=100`,
/// `epoch=3`, `100`, each with or without one of the endings `.pt`, `.pth`, `.bin`, `.ckpt`, `.safetensors`. The number
/// orders the steps. tessera::CheckpointManager writes `step-<n>`, without leading zeros.

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/cancellation.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/verify.h"

namespace tessera::checkpoint {

/// The step that a name contains.
struct StepName {
  std::int64_t step = 0;
  /// What the number counts: the word before it, such as "step", "checkpoint" or "epoch"; empty for a name that is a
  /// number. Numbers of different units cannot be compared.
  std::string unit;
  bool operator==(const StepName&) const = default;
};

/// Returns the name under which tessera saves a step: "step-100".
std::string step_name(std::int64_t step);
/// Returns the step that a name stands for, or nothing. Law: `parse_step_name(step_name(n))` is `{n, "step"}`, n >= 0.
std::optional<StepName> parse_step_name(std::string_view name);

/// An entry of a directory whose name is that of a step.
struct NamedStep {
  std::string name;
  StepName of;
};
/// Returns the directories and checkpoint files in `directory` whose names are those of steps, ordered by number and
/// name. Reads the directory only. Returns nothing if it is not a directory. Throws `Error(io)`.
std::vector<NamedStep> find_steps(const std::filesystem::path& directory);

/// An entry of a run's directory.
struct RunEntry {
  enum class Kind : std::uint8_t {
    step,
    link,     ///< a symbolic link whose name is that of a step
    staging,  ///< written by a save, a conversion or another trainer, which renames it when it is complete
    removed,  ///< the rest of an interrupted removal
  };
  Kind kind = Kind::step;
  std::string name;
  StepName of;  ///< of the step that it is, will be or was
  /// The format of its checkpoint. Nothing if no checkpoint was recognised, complete or not.
  std::optional<SourceKind> format;
  std::int64_t modified_s = 0;       ///< when the newest file was written, in seconds since 1970 (UTC)
  std::optional<std::size_t> ranks;  ///< how many ranks wrote it, if the names of its files tell
  std::uint64_t size_bytes = 0;      ///< of all files in it
  /// Whether every file is there that the description and the names of the others ("model-00001-of-00002.bin")
  /// announce, with the expected size, and the chunks of each tensor cover it. No tensor data is read for it.
  bool complete = false;
  bool in_use = false;  ///< whether a process of tessera writes to it
  std::string problem;  ///< what is wrong, one line; empty if `complete`
};

struct RunDirectory {
  std::filesystem::path path;
  std::vector<RunEntry> entries;               ///< ordered by number, then name
  std::optional<std::size_t> newest_complete;  ///< index of the complete step with the largest number
};

/// Returns whether `path` is a directory with steps in it and no checkpoint of its own.
bool is_run_directory(const std::filesystem::path& path);

/// Lists a run's directory. Reads the description of each checkpoint, and the directories of its torch.save files.
/// Symbolic links are not followed. What is wrong with a step is reported and not thrown. Throws `Error(not_found)` if
/// `directory` does not exist or is not a directory, `Error(io)`, and `Error(cancelled)`.
RunDirectory list_run(const std::filesystem::path& directory, const Cancellation* cancellation = nullptr);

/// Verifies every step of a known format (see verify.h): reads all data. A step with a problem is no longer `complete`,
/// and `problem` states the first one. Returns the number of steps that were `complete` before and are damaged.
std::size_t verify_steps(RunDirectory& run, const VerifyOptions& options = {});

/// Removes an entry of a run's directory, without following symbolic links: renames it to a name that marks it as
/// removed, makes that durable, and then deletes it. If the process is killed at any instant, either the entry is
/// unchanged, or its name is no longer that of a step and `finish_removals` deletes what is left. A file's sidecar is
/// removed with it. Throws `Error(not_found)` if there is no such entry, `Error(io)`.
void remove_step(const std::filesystem::path& directory, const std::string& name);
/// Deletes what interrupted removals left. Throws `Error(io)`.
void finish_removals(const std::filesystem::path& directory);

}  // namespace tessera::checkpoint
