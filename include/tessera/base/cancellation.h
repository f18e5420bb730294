#pragma once
/// \file
/// A request to stop, set by a signal handler or another thread and looked at between pieces of work.

#include <atomic>

#include "tessera/base/error.h"

namespace tessera {

/// `request` is async-signal-safe. All members may be called by any thread.
class Cancellation {
 public:
  void request() noexcept { requested_.store(true, std::memory_order_relaxed); }
  bool requested() const noexcept { return requested_.load(std::memory_order_relaxed); }
  /// Throws `Error(cancelled)` "interrupted" if a stop was requested.
  void check() const {
    if (requested()) throw Error(ErrorCode::cancelled, "interrupted");
  }

 private:
  std::atomic<bool> requested_ = false;
};

}  // namespace tessera
