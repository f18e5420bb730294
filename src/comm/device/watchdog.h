#pragma once
// Ends the work of a backend that runs on streams if a rank fails. A stream waits for other ranks without limit and
// without a way to ask, and the host with it, so a thread looks after the work that was started.

#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "comm/backend/backend.h"
#include "comm/rendezvous/liveness.h"
#include "tessera/comm/internal/call.h"
#include "tessera/comm/internal/streams.h"

namespace tessera::comm {

// Law: at most `timeout`, and the time that Liveness takes to find a rank dead, after work was started, it has ended or
// the failure is reported and the backend is aborted. Streams that waited for it then continue, with undefined
// elements; the next call of the group throws the failure.
class Watchdog {
 public:
  // `ranks`: of the group, in the world.
  Watchdog(Transport transport, std::shared_ptr<Liveness> liveness, std::vector<int> ranks,
           std::chrono::milliseconds timeout);
  // Does not wait for the work.
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  // Looks after work that was just started from this thread.
  void watch(::c10d::Work& work, const Call& call);

 private:
  using Clock = std::chrono::steady_clock;
  struct Watched {
    Mark end;  // of the work, which itself would keep its tensors alive
    Call call;
    Clock::time_point started;
  };
  void run();

  const Transport transport_;
  const std::shared_ptr<Liveness> liveness_;
  const std::vector<int> ranks_;
  const std::chrono::milliseconds timeout_;
  std::mutex mutex_;  // guards the following members
  std::condition_variable stopped_;
  bool stops_ = false;
  std::map<c10::DeviceIndex, SideStream> streams_;  // which wait for the work
  std::deque<Watched> watched_;                     // in the order in which they were started
  std::thread thread_;                              // last: it uses all of the above
};

}  // namespace tessera::comm
