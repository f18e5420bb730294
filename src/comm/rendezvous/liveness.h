#pragma once
// Who is still there. A collective that fails or never ends doesn't say whose fault it is, so every rank has a thread
// that writes signs of life to the store and watches the next rank's. What the first rank finds wrong is said to all.

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "comm/c10d.h"
#include "tessera/comm/internal/call.h"

namespace tessera::comm {

class Liveness {
 public:
  // `store` is this rank's alone. A rank of which nothing was heard for `dead_after` is dead. `keeps_store`: the store
  // goes when this rank leaves.
  Liveness(StorePtr store, bool keeps_store, int rank, int size, std::chrono::milliseconds dead_after);
  Liveness(const Liveness&) = delete;
  Liveness& operator=(const Liveness&) = delete;
  // Says that this rank has left. Who keeps the store gives the others some time to leave, so that they hear what was
  // said to them.
  ~Liveness();

  // This rank is in `call` now, or in none of this group. Threads may be in calls of several groups at once.
  void enter(const Call& call);
  void leave(const std::string& group);

  // What the first rank said that found something wrong; empty while nothing is.
  std::string failure() const;
  // Says what is wrong, unless something was said before, and returns what was said first.
  std::string report(const std::string& what);
  // Looks for whose fault it is that a call of this rank failed because of `cause`, for as long as it may take to find
  // a rank dead, and reports it.
  std::string explain(std::span<const int> ranks, const std::string& cause);
  // The same for a call that others haven't come to.
  std::string explain_timeout(std::span<const int> ranks, const Call& call, std::chrono::milliseconds waited);

 private:
  void run();
  std::uint64_t looks() const;
  void beat();
  void watch_next();
  void wait_for_others();
  std::string read(const std::string& key);
  std::optional<std::string> find_left(std::span<const int> ranks);

  StorePtr store_;
  bool keeps_store_;
  int rank_, size_;
  std::chrono::milliseconds dead_after_, period_;

  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  bool stops_ = false;
  std::map<std::string, Call> calls_;  // that this rank is in, by group
  std::string failure_;
  std::uint64_t looks_ = 0;  // that the thread has taken at the next rank

  std::mutex store_mutex_;  // guards the store
  std::uint64_t beats_ = 0;

  int watched_ = -1;  // what follows is the thread's alone
  std::string last_sign_;
  std::chrono::steady_clock::time_point last_heard_;
  std::thread thread_;
};

}  // namespace tessera::comm
