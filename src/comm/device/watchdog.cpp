#include "comm/device/watchdog.h"

#include <string>
#include <utility>

namespace tessera::comm {

namespace {

constexpr std::chrono::milliseconds kPeriod(100);

}  // namespace

Watchdog::Watchdog(Transport transport, std::shared_ptr<Liveness> liveness, std::vector<int> ranks,
                   std::chrono::milliseconds timeout)
    : transport_(std::move(transport)),
      liveness_(std::move(liveness)),
      ranks_(std::move(ranks)),
      timeout_(timeout),
      thread_([this] { run(); }) {}

Watchdog::~Watchdog() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stops_ = true;
  }
  stopped_.notify_all();
  thread_.join();
}

void Watchdog::watch(::c10d::Work& work, const Call& call) {
  const auto future = work.getFuture();
  // Completed means that the work is on a stream.
  if (future == nullptr || !future->completed() || future->devices().empty()) return;
  const c10::Device device = future->devices()[0];
  Watched watched{{}, call, Clock::now()};
  const std::lock_guard<std::mutex> lock(mutex_);
  {
    const OnStream on(streams_.try_emplace(device.index(), device).first->second);
    future->wait();  // makes this stream wait
    watched.end.set(device);
  }
  watched_.push_back(std::move(watched));
}

void Watchdog::run() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stopped_.wait_for(lock, kPeriod, [this] { return stops_; })) {
    if (watched_.empty()) continue;
    const Watched oldest = watched_.front();
    lock.unlock();
    const bool has_ended = oldest.end.is_reached();  // on the one stream, in the order of the starts
    if (!has_ended) liveness_->enter_if_in_none(oldest.call);
    std::string failure = has_ended ? std::string() : liveness_->failure();
    const auto waited = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - oldest.started);
    if (!has_ended && failure.empty() && waited >= timeout_)
      failure = liveness_->explain_timeout(ranks_, oldest.call, waited);
    if (!failure.empty()) transport_.abort(*transport_.backend);
    lock.lock();
    if (has_ended) {
      watched_.pop_front();
    } else if (!failure.empty()) {
      return watched_.clear();
    }
  }
}

}  // namespace tessera::comm
