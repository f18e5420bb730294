#pragma once
/// \file
/// Manages a directory of checkpoints, one for each saved step: `<directory>/step-<n>`. `tessera ls` lists them
/// (tessera/checkpoint/manage/run_directory.h).
///
///     CheckpointManager manager("checkpoints", group, {.save_every = 100, .keep_last = 3});
///     std::int64_t step = manager.restore_latest(state).value_or(0);
///     while (...) {
///       train(++step);
///       manager.save(step, state_now());
///     }
///     manager.wait();
///
/// Laws: a step exists if and only if its save was committed. The constructor removes what a killed job left of
/// unfinished saves and removals, and nothing else: a directory `step-<n>` without `.metadata` stays if it has an entry
/// that no unfinished save leaves, such as a checkpoint of another format. An older checkpoint is removed only after a
/// newer one is committed, by a rename, so that every existing checkpoint is complete, whenever the job is killed. Only
/// one job at a time may use a directory.

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/comm/process_group.h"
#include "tessera/state/async_save.h"
#include "tessera/state/load.h"
#include "tessera/state/value.h"

namespace tessera {

struct CheckpointManagerOptions {
  /// `save` saves the steps that are a multiple of this; at least 1.
  std::int64_t save_every = 1;
  /// How many of the newest checkpoints are kept, at least 1; all of them if not set.
  std::optional<std::size_t> keep_last = std::nullopt;
  /// How many checkpoints with the best metrics are kept in addition.
  std::size_t keep_best = 0;
  enum class Best : std::uint8_t { lowest, highest } best = Best::lowest;
  /// Whether saves run in the background; see AsyncSaver.
  bool async = true;
  AsyncSaveOptions save = {};  ///< `format` must be dcp
  LoadOptions load = {};
  /// Receives warnings on rank 0: a damaged checkpoint was skipped, a checkpoint could not be removed, a metric is not
  /// finite, or the directory of a step has files that are not of a save. Called from any thread.
  std::function<void(const std::string&)> warn = nullptr;
};

/// A manager that saves the state every few steps, removes old checkpoints and restores the latest one.
class CheckpointManager {
 public:
  /// Creates the directory and removes what unfinished saves left in it. A collective of `group`. Throws
  /// `Error(invalid_argument)` for invalid options, and `Error(io)` on every rank, also if it cannot look up whether a
  /// step was committed; that step is then unchanged.
  explicit CheckpointManager(std::filesystem::path directory, const ProcessGroup& group = {},
                             CheckpointManagerOptions options = {});
  ~CheckpointManager();
  CheckpointManager(const CheckpointManager&) = delete;
  CheckpointManager& operator=(const CheckpointManager&) = delete;

  /// Returns whether `save` saves this step by default.
  bool is_due(std::int64_t step) const { return step % options_.save_every == 0; }
  /// Saves the state of a step if the step is due or `always` is true; returns whether it saves. A collective. Only the
  /// `metric` of rank 0 is used, for `keep_best`; one that is not finite is ignored with a warning. Throws
  /// `Error(invalid_argument)` for a step below 0, and as AsyncSaver::save, or as tessera::save if `async` is false.
  bool save(std::int64_t step, const StateDict& state, std::optional<double> metric = std::nullopt,
            bool always = false);
  /// Blocks until no save runs in the background; see AsyncSaver::wait.
  void wait();

  /// Returns the committed steps in ascending order, as this rank sees the directory now. Throws `Error(io)`.
  std::vector<std::int64_t> steps() const;
  /// Returns the last of `steps()`, or nothing if there is none. Throws `Error(io)`.
  std::optional<std::int64_t> latest() const;
  /// Returns the directory of a step's checkpoint, whether or not it exists.
  std::filesystem::path path_of(std::int64_t step) const;

  /// Loads the newest intact checkpoint into `state` and returns its step, or nothing if there is no checkpoint. A
  /// collective. Skips damaged and incomplete checkpoints with a warning, and throws `Error(corrupt)` if all are
  /// damaged. Throws as tessera::load if `state` does not match the checkpoint.
  std::optional<std::int64_t> restore_latest(StateDict& state);
  /// Loads the checkpoint of `step` into `state`. A collective. Throws as tessera::load.
  void restore(std::int64_t step, StateDict& state);

 private:
  void warn(const std::string& what) const;
  void remove_uncommitted() const;
  void after_save(std::int64_t step, std::optional<double> metric) const;

  std::filesystem::path directory_;
  ProcessGroup group_;
  CheckpointManagerOptions options_;
  std::unique_ptr<AsyncSaver> saver_;
};

}  // namespace tessera
