#include "comm/host/engine.h"

#include <fmt/format.h>

#include <algorithm>
#include <stdexcept>

namespace tessera::comm {

using Clock = std::chrono::steady_clock;

void HostEngines::add(const std::shared_ptr<HostEngine>& engine) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::erase_if(engines_, [](const auto& known) { return known.expired(); });
  engines_.push_back(engine);
}

void HostEngines::advance() noexcept {
  std::vector<std::shared_ptr<HostEngine>> engines;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& known : engines_) {
      if (auto engine = known.lock()) engines.push_back(std::move(engine));
    }
  }
  for (const auto& engine : engines) engine->try_to_advance();
}

void HostEngine::try_to_advance() noexcept {
  const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock() || failure_) return;  // who holds it advances
  try {
    advance();
  } catch (...) {  // failure_
  }
}

void HostEngine::start(const EngineOpPtr& op, bool after_previous) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (op->take_number(started_ + 1)) ++started_;
  queue_.push_back({op, after_previous});
  try {
    advance();
  } catch (...) {  // failure_
  }
}

void HostEngine::advance() {
  if (failure_) std::rethrow_exception(failure_);
  try {
    struct Channel {
      bool sends = true, receives = true;
    };
    Channel host, link;
    const auto may_do_something = [](const Channel& channel) { return channel.sends || channel.receives; };
    for (std::size_t i = 0; i < queue_.size() && (may_do_something(host) || may_do_something(link)); ++i) {
      Queued& queued = queue_[i];
      Channel& channel = queued.op->is_on_link() ? link : host;
      if (queued.after_previous && i > 0 && !queue_[i - 1].has_ended()) channel.sends = false;
      std::uint64_t moved_bytes = 0;
      do {
        moved_bytes = queued.op->moved_bytes();
        if (channel.sends && !queued.has_sent) queued.has_sent = queued.op->send(*host_);
        if (channel.receives && !queued.has_received) queued.has_received = queued.op->receive(*host_);
      } while (queued.op->moved_bytes() != moved_bytes);
      channel.sends = channel.sends && queued.has_sent;
      channel.receives = channel.receives && queued.has_received;
      if (i == 0 && queued.has_ended()) {
        queue_.pop_front();
        --i;  // the next one is the first now
      }
    }
  } catch (...) {
    failure_ = std::current_exception();
    throw;
  }
}

bool HostEngine::is_queued(const EngineOp& op) const {
  return std::any_of(queue_.begin(), queue_.end(), [&](const Queued& queued) { return queued.op.get() == &op; });
}

bool HostEngine::has_ended(const EngineOp& op) {
  const std::lock_guard<std::mutex> lock(mutex_);
  advance();
  return !is_queued(op);
}

bool HostEngine::wait(const EngineOp& op, std::chrono::milliseconds limit) {
  const auto poll = [&] {
    const std::lock_guard<std::mutex> lock(mutex_);
    advance();
    return !is_queued(op);
  };
  return host_->wait(
      poll, [&] { check(); }, Clock::now() + limit);
}

void HostEngine::check() {
  constexpr std::chrono::seconds kMostMismatched(3);
  of_rank_->advance();
  std::vector<int> left;
  for (int r = 0; r < host_->size(); ++r) {
    if (r != host_->rank() && host_->has_left(r)) left.push_back(r);
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  advance();  // what ranks had sent before they left
  for (const int r : left) {
    const bool is_awaited =
        std::any_of(queue_.begin(), queue_.end(), [r](const Queued& queued) { return queued.op->awaits(r); });
    if (is_awaited) throw_failure(fmt::format("rank {} of those on this host has closed its shared memory", r));
  }
  const auto mismatched =
      std::find_if(queue_.begin(), queue_.end(), [](const Queued& queued) { return !queued.op->mismatch().empty(); });
  if (mismatched == queue_.end()) return mismatched_since_.reset();
  if (!mismatched_since_) mismatched_since_ = Clock::now();
  if (Clock::now() - *mismatched_since_ > kMostMismatched) throw_failure(mismatched->op->mismatch());
}

// All that asks from now on finds the failure: what is queued neither ends nor remains pending.
void HostEngine::throw_failure(const std::string& why) {
  failure_ = std::make_exception_ptr(std::runtime_error(why));
  std::rethrow_exception(failure_);
}

}  // namespace tessera::comm
