#pragma once
/// \file
/// Saves checkpoints in the background. `save` blocks the trainer only while it copies the state; a thread then writes
/// the copy, over a process group of its own.
///
///     tessera::AsyncSaver saver(group);
///     for (...) {
///       train();
///       saver.save(state, "checkpoints/step-" + std::to_string(step));
///     }
///     saver.wait();
///
/// The copies (staging) are kept and reused by the next save of a state of the same shape, so they cost the size of
/// this rank's part of the state, once. Views of one storage that overlap, such as a tensor under several names, share
/// their copy. PyTorch: async_save in torch/distributed/checkpoint/state_dict_saver.py.

#include <cstdint>
#include <exception>
#include <filesystem>
#include <functional>
#include <future>
#include <memory>

#include "tessera/checkpoint/storage.h"
#include "tessera/comm/process_group.h"
#include "tessera/state/save.h"

namespace tessera {

struct AsyncSaveOptions : SaveOptions {
  enum class WhenBusy : std::uint8_t {
    wait,    ///< `save` waits until the previous save has finished
    refuse,  ///< if the previous save still runs on any rank, `save` throws `Error(invalid_argument)` on every rank
  };
  WhenBusy when_busy = WhenBusy::wait;
  /// If true, the next call of `save` or `wait` throws the error of a failed save; that `save` then saves nothing. If
  /// false, only the future of the failed save holds the error, and training continues.
  bool throw_at_next_call = true;
  /// Whether plans are reused from save to save; see checkpoint::SavePlanCache.
  bool remember_plans = true;
};

/// A saver that writes one state at a time in the background. Each rank has one.
class AsyncSaver {
 public:
  /// Creates the process group of the saving thread. A collective of `group`. Ignores `options.cache`.
  explicit AsyncSaver(const ProcessGroup& group = {}, const AsyncSaveOptions& options = {});
  /// Waits for the running save and discards its error. Call `wait` first to see the error.
  ~AsyncSaver();
  AsyncSaver(const AsyncSaver&) = delete;
  AsyncSaver& operator=(const AsyncSaver&) = delete;

  /// Copies the state, starts writing it and returns; the state may then be changed. A collective of the group, as
  /// tessera::save. If copying fails on any rank, every rank throws. If writing fails later on any rank, the future of
  /// every rank holds the error.
  std::shared_future<SaveReport> save(const StateDict& state, const std::filesystem::path& directory);
  /// Saves to `storage`, as above. If `then` is set, runs it on the saving thread of each rank after the commit and
  /// before the future is ready. If `then` throws, the save fails with that error.
  std::shared_future<SaveReport> save(const StateDict& state, const std::shared_ptr<checkpoint::Storage>& storage,
                                      std::function<void()> then = nullptr);
  /// Blocks until the last save completes. Throws its error, unless the error was thrown before or
  /// `throw_at_next_call` is false.
  void wait();
  /// Returns whether a save runs on this rank.
  bool is_busy() const;
  /// Returns the size of the kept copies, in bytes.
  std::uint64_t staging_bytes() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera
