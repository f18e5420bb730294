#include "tessera/base/thread_pool.h"

#include <sched.h>

#include <algorithm>
#include <system_error>
#include <utility>

#include "tessera/base/error.h"

namespace tessera {

ThreadPool::ThreadPool(std::size_t threads, std::size_t queue_limit)
    : queue_limit_(queue_limit == 0 ? std::max<std::size_t>(threads, 1) : queue_limit) {
  try {
    for (std::size_t i = 0; i < std::max<std::size_t>(threads, 1); ++i) threads_.emplace_back([this] { work(); });
  } catch (const std::system_error& error) {  // such as a limit on memory, which a stack needs; those that run suffice
    if (threads_.empty()) fail(ErrorCode::io, "start a thread: the system refused ({}), expected one", error.what());
  }
}

ThreadPool::~ThreadPool() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    queue_.clear();
  }
  task_ready_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void ThreadPool::submit(std::function<void()> task) {
  std::unique_lock lock(mutex_);
  space_ready_.wait(lock, [this] { return error_ || queue_.size() < queue_limit_; });
  if (error_) std::rethrow_exception(error_);
  queue_.push_back(std::move(task));
  lock.unlock();
  task_ready_.notify_one();
}

void ThreadPool::wait() {
  std::unique_lock lock(mutex_);
  idle_.wait(lock, [this] { return queue_.empty() && running_ == 0; });
  if (error_) std::rethrow_exception(error_);
}

void ThreadPool::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    task_ready_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
    if (stopping_) return;
    std::function<void()> task = std::move(queue_.front());
    queue_.pop_front();
    ++running_;
    // Wakes the producer when half of the queue is free, not for every task.
    const bool has_much_space = queue_.size() <= queue_limit_ / 2;
    lock.unlock();
    if (has_much_space) space_ready_.notify_one();
    std::exception_ptr error;
    try {
      task();
    } catch (...) {
      error = std::current_exception();
    }
    task = nullptr;
    lock.lock();
    --running_;
    if (error) fail_with(error);
    if (queue_.empty() && running_ == 0) idle_.notify_all();
  }
}

void ThreadPool::fail_with(std::exception_ptr error) {
  if (!error_) error_ = std::move(error);
  queue_.clear();
  space_ready_.notify_all();
}

std::size_t available_processors() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (::sched_getaffinity(0, sizeof set, &set) == 0) {
    const int count = CPU_COUNT(&set);
    if (count > 0) return static_cast<std::size_t>(count);
  }
  return std::max(1u, std::thread::hardware_concurrency());
}

std::size_t threads_for(std::size_t jobs) {
  return jobs != 0 ? jobs : std::clamp<std::size_t>(available_processors(), 4, 16);
}

}  // namespace tessera
