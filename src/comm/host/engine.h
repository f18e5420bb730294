#pragma once
// Runs the collectives of a group on a Host, in the order in which they were started. What goes over a link to other
// hosts has an order of its own, so that neither keeps the other waiting.
//
// Nothing runs in the background: a collective advances when it is started, and whenever this rank waits for any
// collective of the group; now and then as well when it waits in another group, or for a message. Law: if all ranks
// start the same collectives in the same order and wait for them in any order, all of them end, however small the rings
// are: of the collectives that some rank has not ended, the first is the head of that rank's queue, and all ranks that
// wait advance it.

#include <chrono>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "comm/host/host.h"
#include "comm/host/ops.h"

namespace tessera::comm {

class HostEngine;

// The engines of all groups of a rank, so that a rank that waits in one group does not keep the others waiting.
class HostEngines {
 public:
  void add(const std::shared_ptr<HostEngine>& engine);
  // Advances the collectives of all groups.
  void advance() noexcept;

 private:
  std::mutex mutex_;
  std::vector<std::weak_ptr<HostEngine>> engines_;
};

class HostEngine {
 public:
  HostEngine(std::unique_ptr<Host> host, std::shared_ptr<HostEngines> of_rank)
      : host_(std::move(host)), of_rank_(std::move(of_rank)) {}

  const Host& host() const { return *host_; }
  // Starts a collective. With `after_previous`, it sends what the previous one has received. Keeps an exception for who
  // waits: that of another rank, or of a link, is no refusal of this collective.
  void start(const EngineOpPtr& op, bool after_previous = false);
  // Advances what was started. Keeps an exception for who waits.
  void try_to_advance() noexcept;
  // Returns whether the collective has ended: its tensors may be changed, and its results be used.
  bool has_ended(const EngineOp& op);
  // Blocks until `op` has ended. Returns false if it has not after `limit`. Throws std::runtime_error if a rank that
  // something is missing from has left, or has been in another collective for some time: the group finds out first
  // which ranks are in which of its calls.
  bool wait(const EngineOp& op, std::chrono::milliseconds limit);

 private:
  struct Queued {
    EngineOpPtr op;
    bool after_previous = false, has_sent = false, has_received = false;
    bool has_ended() const { return has_sent && has_received; }
  };
  void advance();
  bool is_queued(const EngineOp& op) const;
  // Throws if what is queued cannot end.
  void check();
  [[noreturn]] void throw_failure(const std::string& why);

  std::mutex mutex_;
  const std::unique_ptr<Host> host_;
  const std::shared_ptr<HostEngines> of_rank_;
  std::uint64_t started_ = 0;
  std::deque<Queued> queue_;
  std::exception_ptr failure_;
  std::optional<std::chrono::steady_clock::time_point> mismatched_since_;
};

}  // namespace tessera::comm
