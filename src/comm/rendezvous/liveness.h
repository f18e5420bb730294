#pragma once
// Detection of dead ranks. A collective that fails or never ends does not tell which rank is at fault. So every rank
// has a thread that writes signs of life to the store and watches those of the next rank. The first rank that finds a
// failure reports it to all.

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

// The calls that this rank has made.
struct CallCounts {
  std::map<std::string, std::int64_t> collectives;  // by name
  std::int64_t comparisons = 0;
};

class Liveness {
 public:
  // `store` must be used by this object alone. A rank without a sign of life for `dead_after` is dead; without a value,
  // ranks are threads, which cannot die unnoticed and may be late on a busy machine. `keeps_store`: the store ends when
  // this rank leaves. `keeper`: who keeps the store, for messages.
  Liveness(StorePtr store, bool keeps_store, int rank, int size, std::optional<std::chrono::milliseconds> dead_after,
           std::string keeper = "rank 0");
  Liveness(const Liveness&) = delete;
  Liveness& operator=(const Liveness&) = delete;
  // Reports that this rank has left. The rank that keeps the store gives the others, except those that are dead, some
  // time to leave, so that they can still read the reports.
  ~Liveness();

  // Record that this rank is in `call`, or in no call of this group. Threads may be in calls of several groups at once.
  void enter(const Call& call);
  void leave(const std::string& group);
  // Records that this rank is in `call`, if it is in no call of the group: the work of `call` runs, although the host
  // has left it.
  void enter_if_in_none(const Call& call);
  // Records that this rank is in no call of the group, if it is in `call`.
  void leave_if_in(const Call& call);
  // Counts a call of any group.
  void count(const Call& call);
  CallCounts counts() const;

  // Returns the first failure that a rank reported; empty if there is none.
  std::string failure() const;
  // Reports a failure, unless one was reported before. Returns the first report.
  std::string report(const std::string& what);
  // The same for a rank that has no such object. `store`: that of the other ranks' objects.
  static std::string report(::c10d::Store& store, const std::string& what);
  // Writes and reads a note to all ranks, empty if there is none.
  void put(const std::string& key, const std::string& text);
  std::string read(const std::string& key);
  // Records that this rank left a step for this reason: what others name if they then find it dead. Empty: it has met
  // them since.
  void record_reason(const std::string& reason) noexcept;
  // Returns the call of `group` that `rank` is in, as of its last sign of life.
  std::optional<Call> call_of(int rank, const std::string& group);
  // Finds the rank that caused a call of this rank to fail with `cause`, waiting as long as it can take to find a rank
  // dead. Reports the failure.
  std::string explain(std::span<const int> ranks, const std::string& cause);
  // The same for a call that other ranks have not arrived at.
  std::string explain_timeout(std::span<const int> ranks, const Call& call, std::chrono::milliseconds waited);
  // Returns "rank <r> left the group" if some of these ranks did so. Reads one key if no rank did.
  std::optional<std::string> find_left(std::span<const int> ranks);
  std::chrono::milliseconds dead_after() const { return dead_after_; }

 private:
  void run();
  std::string without_store(const std::string& why) const;
  std::uint64_t looks() const;
  void beat();
  void watch_next();
  void compare_calls(int other, const std::map<std::string, Call>& theirs);
  void listen_to_all();
  void wait_for_others();

  StorePtr store_;
  bool keeps_store_;
  std::string keeper_;
  int rank_, size_;
  bool may_die_;
  std::chrono::milliseconds dead_after_, period_;

  mutable std::mutex mutex_;  // guards the following members
  std::condition_variable changed_;
  bool stops_ = false;
  std::map<std::string, Call> calls_;  // the calls that this rank is in, by group
  CallCounts counts_;
  std::string failure_;
  std::uint64_t looks_ = 0;  // how often the thread has checked the next rank

  std::mutex store_mutex_;  // guards the store
  std::uint64_t beats_ = 0;

  struct Sign {
    std::string text;
    std::chrono::steady_clock::time_point since;
  };
  int watched_ = -1;  // only the thread uses this and the following members
  std::string last_sign_;
  std::chrono::steady_clock::time_point last_heard_;
  std::vector<Sign> signs_;  // of all ranks, by rank, if this rank keeps the store
  std::thread thread_;
};

}  // namespace tessera::comm
