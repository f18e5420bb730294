#pragma once
/// \file
/// A request to stop. A signal handler or another thread sets it; long operations check it between pieces of work.

#include <atomic>

#include "tessera/base/error.h"

namespace tessera {

/// A stop flag. `request` is async-signal-safe. Any thread may call any member.
class Cancellation {
 public:
  void request() noexcept { requested_.store(true, std::memory_order_relaxed); }
  bool requested() const noexcept { return requested_.load(std::memory_order_relaxed); }
  /// Throws `Error(cancelled)` with the message "interrupted" if a stop was requested.
  void check() const {
    if (requested()) throw Error(ErrorCode::cancelled, "interrupted");
  }

 private:
  std::atomic<bool> requested_ = false;
};

}  // namespace tessera
