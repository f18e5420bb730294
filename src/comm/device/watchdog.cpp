#include "comm/device/watchdog.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "comm/exceptions.h"

namespace tessera::comm {

namespace {

constexpr std::chrono::milliseconds kPeriod(100), kDrainingPeriod(1);
// A call that takes longer waits for other ranks. One that does not is not aborted while the host is in it.
constexpr std::chrono::milliseconds kLongStart(1000);

}  // namespace

Watchdog::Watchdog(Transport transport, std::shared_ptr<Liveness> liveness, std::chrono::milliseconds timeout)
    : transport_(std::move(transport)), liveness_(std::move(liveness)), timeout_(timeout), thread_([this] { run(); }) {}

Watchdog::~Watchdog() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stops_ = true;
  }
  stopped_.notify_all();
  thread_.join();
}

Watchdog::Starting::Starting(Watchdog* watchdog, const Call& call, const std::vector<int>& others, c10::Device device)
    : watchdog_(watchdog) {
  if (watchdog_ == nullptr) return;
  const std::lock_guard<std::mutex> lock(watchdog_->mutex_);
  watchdog_->starting_ = Watched{{}, device, call, others, Clock::now()};
}

Watchdog::Starting::~Starting() {
  if (watchdog_ == nullptr) return;
  const std::lock_guard<std::mutex> lock(watchdog_->mutex_);
  watchdog_->starting_.reset();
}

void Watchdog::watch(const Call& call, const std::vector<int>& others, c10::Device device) {
  Watched watched{{}, device, call, others, Clock::now()};
  watched.end.set(device);
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!has_failed_) watched_.push_back(std::move(watched));
}

std::optional<Watchdog::Watched> Watchdog::oldest() {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto has_ended = [this](const Watched& work) {
    if (!work.end.is_reached()) return false;
    liveness_->leave_if_in(work.call);
    return true;
  };
  watched_.erase(std::remove_if(watched_.begin(), watched_.end(), has_ended), watched_.end());
  return watched_.empty() ? std::nullopt : std::optional(watched_.front());
}

void Watchdog::finish() {
  try {
    while (oldest()) std::this_thread::sleep_for(kDrainingPeriod);
  } catch (const std::exception&) {  // the device has failed
  }
}

bool Watchdog::has_failed(const Watched& work) {
  if (!liveness_->failure().empty()) return true;
  const auto waited = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - work.started);
  if (waited < timeout_) return false;
  liveness_->explain_timeout(work.others, work.call, waited);
  return true;
}

void Watchdog::run() {
  std::unique_lock<std::mutex> lock(mutex_);
  bool fails = false;
  while (!fails && !stopped_.wait_for(lock, kPeriod, [this] { return stops_; })) {
    std::optional<Watched> starting;
    if (starting_ && Clock::now() - starting_->started > kLongStart) starting = starting_;
    if (watched_.empty() && !starting) continue;
    const c10::Device device = starting ? starting->device : watched_.front().device;
    lock.unlock();
    try {
      guard_of(device).setDevice(device);  // of a thread on another device, a destroyed event would initialize that one
      const std::optional<Watched> work = oldest();
      if (work) liveness_->enter_if_in_none(work->call);
      fails = (work && has_failed(*work)) || (starting && has_failed(*starting));
    } catch (...) {  // of a device that has failed
      liveness_->report(message_of(std::current_exception()));
      fails = true;
    }
    lock.lock();
  }
  if (!fails) return;
  has_failed_ = true;
  watched_.clear();
  lock.unlock();
  try {
    if (transport_.abort != nullptr) transport_.abort(*transport_.backend);
  } catch (...) {  // the failure is reported already
  }
}

}  // namespace tessera::comm
