#pragma once
// Runs the collectives of a group on a Host, in the order in which they were started.
//
// Nothing runs in the background: a collective advances when it is started, and whenever this rank waits for any
// collective of the group. Law: if all ranks start the same collectives in the same order and wait for them in any
// order, all of them end, however small the rings are: of the collectives that some rank has not ended, the first is
// the head of that rank's queue, and all ranks that wait advance it.

#include <chrono>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "comm/host/host.h"
#include "comm/host/ops.h"

namespace tessera::comm {

class HostEngine {
 public:
  explicit HostEngine(std::unique_ptr<Host> host) : host_(std::move(host)) {}

  const Host& host() const { return *host_; }
  // Starts a collective. With `after_previous`, it sends what the previous one has received.
  void start(const HostOpPtr& op, bool after_previous = false);
  // Returns whether the collective has ended: its tensors may be changed, and its results be used.
  bool has_ended(const HostOp& op);
  // Blocks until `op` has ended. Returns false if it has not after `limit`. Throws std::runtime_error if a rank that
  // something is missing from has left, or has been in another collective for some time: the group finds out first
  // which ranks are in which of its calls.
  bool wait(const HostOp& op, std::chrono::milliseconds limit);

 private:
  struct Queued {
    HostOpPtr op;
    bool after_previous = false, has_sent = false, has_received = false;
  };
  void advance();
  bool is_queued(const HostOp& op) const;
  // Throws if what is queued cannot end.
  void check();

  std::mutex mutex_;
  const std::unique_ptr<Host> host_;
  std::uint64_t started_ = 0;
  std::deque<Queued> queue_;
  std::exception_ptr failure_;
  std::optional<std::chrono::steady_clock::time_point> mismatched_since_;
};

}  // namespace tessera::comm
