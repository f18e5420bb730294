#pragma once
/// \file
/// Saves while training goes on: the state is copied, which stops the trainer for as long as copying takes, and written
/// by a thread of its own, over a process group of its own.
///
///     tessera::AsyncSaver saver(group);
///     for (...) {
///       train();
///       saver.save(state, "checkpoints/step-" + std::to_string(step));
///     }
///     saver.wait();
///
/// The copies are kept and used again by the next save of a state of the same shape: memory is that of this rank's part
/// of the state, once. PyTorch: async_save in torch/distributed/checkpoint/state_dict_saver.py.

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
    wait,    ///< the next save waits until the one before it has ended
    refuse,  ///< it is `Error(invalid_argument)` on all ranks if it hasn't on any, and nothing happens
  };
  WhenBusy when_busy = WhenBusy::wait;
  /// Whether what a save threw is thrown by the next call of `save`, which then saves nothing, or of `wait`. If not, it
  /// is in the save's future alone, and training goes on.
  bool throw_at_next_call = true;
  /// Whether plans are remembered from save to save; see checkpoint::SavePlanCache.
  bool remember_plans = true;
};

class AsyncSaver {
 public:
  /// A collective of `group`: makes the group that is saved over. `options.cache` is not looked at.
  explicit AsyncSaver(const ProcessGroup& group = {}, const AsyncSaveOptions& options = {});
  /// Waits for what runs. What it throws is lost: call `wait` before.
  ~AsyncSaver();
  AsyncSaver(const AsyncSaver&) = delete;
  AsyncSaver& operator=(const AsyncSaver&) = delete;

  /// A collective of the group, as tessera::save. Returns when the state is copied: it may be changed then. What goes
  /// wrong while copying, on any rank, is thrown on all; what goes wrong later is in the future, on all ranks alike.
  std::shared_future<checkpoint::WriteReport> save(const StateDict& state, const std::filesystem::path& directory);
  /// `then` runs on the saving thread of each rank when the checkpoint is committed, before the future is ready; what
  /// it throws is the save's error.
  std::shared_future<checkpoint::WriteReport> save(const StateDict& state,
                                                   const std::shared_ptr<checkpoint::Storage>& storage,
                                                   std::function<void()> then = nullptr);
  /// Until the last save has ended. Throws what it threw, unless that was thrown before or options say otherwise.
  void wait();
  /// Whether a save runs on this rank.
  bool is_busy() const;
  /// Bytes of the copies that are kept.
  std::uint64_t staging_bytes() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera
