#pragma once
// Ends the work of a backend that runs on streams if a rank fails. A stream waits for other ranks without limit and
// without a way to ask, and the host with it, so a thread looks after the work that streams wait for.

#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "comm/backend/backend.h"
#include "comm/rendezvous/liveness.h"
#include "tessera/comm/internal/call.h"
#include "tessera/comm/internal/streams.h"

namespace tessera::comm {

// Law: at most `timeout`, and the time that Liveness takes to find a rank dead, after a stream began to wait for work,
// or the host for a call that starts work, it has ended, or the failure is reported and the backend is aborted, if it
// has `abort`. The streams and the host then continue, with undefined elements; the next call of the group throws the
// failure.
//
// The host waits because NCCL connects ranks in the first collective that uses an algorithm, although the group has
// connected before (ProcessGroup::Impl::carrier). Not watched is the start of a first message (point_to_point.cpp).
class Watchdog {
 public:
  Watchdog(Transport transport, std::shared_ptr<Liveness> liveness, std::chrono::milliseconds timeout);
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  // Looks after work for which the current stream of `device` was just made to wait. `others`: the ranks, in the world,
  // that may be at fault. May be called from any thread.
  void watch(const Call& call, const std::vector<int>& others, c10::Device device);
  // Blocks until all work has ended, or a failure was found.
  void finish();

  // A call of the backend that starts work. One exists at a time.
  class Starting {
   public:
    // `watchdog` may be null.
    Starting(Watchdog* watchdog, const Call& call, const std::vector<int>& others, c10::Device device);
    ~Starting();
    Starting(const Starting&) = delete;
    Starting& operator=(const Starting&) = delete;

   private:
    Watchdog* const watchdog_;
  };

 private:
  using Clock = std::chrono::steady_clock;
  struct Watched {
    Mark end;
    c10::Device device;
    Call call;
    std::vector<int> others;
    Clock::time_point started;
  };
  void run();
  // Forgets work that has ended. Returns what has run longest of the rest.
  std::optional<Watched> oldest();
  // Reports why `work` cannot end, if that is known or it has run too long. Returns whether it is so.
  bool has_failed(const Watched& work);

  const Transport transport_;
  const std::shared_ptr<Liveness> liveness_;
  const std::chrono::milliseconds timeout_;
  std::mutex mutex_;  // guards the following members; no function of a device that may block is called with it
  std::condition_variable stopped_;
  bool stops_ = false, has_failed_ = false;
  std::deque<Watched> watched_;      // in the order in which streams began to wait
  std::optional<Watched> starting_;  // what the host starts
  std::thread thread_;               // last: it uses all of the above
};

}  // namespace tessera::comm
