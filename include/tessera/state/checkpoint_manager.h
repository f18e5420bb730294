#pragma once
/// \file
/// A directory of checkpoints, one for each step that was saved: `<directory>/step-<n>`.
///
///     CheckpointManager manager("checkpoints", group, {.save_every = 100, .keep_last = 3});
///     std::int64_t step = manager.restore_latest(state).value_or(0);
///     while (...) {
///       train(++step);
///       manager.save(step, state_now());
///     }
///     manager.wait();
///
/// Laws: a step is there if its save was committed; what a killed job left of others is removed when the next one
/// begins. An older checkpoint is removed only when a newer one is committed, and in such an order that, killed at any
/// instant, what is there is whole. One job at a time works on a directory.

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
  /// `save` does something for steps that are a multiple of it.
  std::int64_t save_every = 1;
  /// How many of the newest are kept; nothing: all.
  std::optional<std::size_t> keep_last = std::nullopt;
  /// How many of those with the best metric are kept besides.
  std::size_t keep_best = 0;
  enum class Best : std::uint8_t { lowest, highest } best = Best::lowest;
  /// Whether saves run in the background; see AsyncSaver.
  bool async = true;
  AsyncSaveOptions save = {};  ///< whose format is dcp
  LoadOptions load = {};
  /// Told on rank 0 what went another way than wanted: a damaged checkpoint that was passed over, one that could not be
  /// removed. From any thread.
  std::function<void(const std::string&)> warn = nullptr;
};

class CheckpointManager {
 public:
  /// A collective of `group`. Makes the directory, and removes what saves that never ended left in it.
  explicit CheckpointManager(std::filesystem::path directory, const ProcessGroup& group = {},
                             CheckpointManagerOptions options = {});
  ~CheckpointManager();
  CheckpointManager(const CheckpointManager&) = delete;
  CheckpointManager& operator=(const CheckpointManager&) = delete;

  bool is_due(std::int64_t step) const { return step % options_.save_every == 0; }
  /// Saves the state of a step if it is due or `always`; returns whether it does. A collective; `metric` is rank 0's,
  /// and counts for keep_best. Throws as AsyncSaver::save, or as tessera::save if it isn't async.
  bool save(std::int64_t step, const StateDict& state, std::optional<double> metric = std::nullopt,
            bool always = false);
  /// Until nothing runs in the background; see AsyncSaver::wait.
  void wait();

  /// The steps whose saves were committed, ascending, as this rank sees the directory now.
  std::vector<std::int64_t> steps() const;
  std::optional<std::int64_t> latest() const;
  std::filesystem::path path_of(std::int64_t step) const;

  /// Loads the newest checkpoint that is whole into `state` and returns its step; nothing if there is none. A
  /// collective. One that is damaged or incomplete is passed over, with a warning; `Error(corrupt)` if all are. What is
  /// wrong with `state` is thrown, as by tessera::load.
  std::optional<std::int64_t> restore_latest(StateDict& state);
  /// Loads that of a step. A collective. Throws as tessera::load.
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
