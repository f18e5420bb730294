#pragma once
/// \file
/// Threads with a bounded queue.
///
/// Laws: at most `threads` tasks run and at most `queue_limit` wait, `submit` blocks beyond that, so memory held by
/// tasks is bounded. After a task threw, tasks not yet begun are dropped, and `submit` and `wait` throw the first
/// task's exception.

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace tessera {

class ThreadPool {
 public:
  /// `threads` >= 1. `queue_limit` 0 means as many as there are threads.
  explicit ThreadPool(std::size_t threads, std::size_t queue_limit = 0);
  /// Drops tasks not yet begun, waits for those that run.
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  /// Queues `task`; blocks while the queue is full. Throws the exception of a task that failed before.
  void submit(std::function<void()> task);
  /// Blocks until all tasks have ended; throws the first exception. The pool can be used again only if none threw.
  void wait();
  std::size_t threads() const { return threads_.size(); }

 private:
  void work();
  void fail_with(std::exception_ptr error);

  std::mutex mutex_;
  std::condition_variable task_ready_, space_ready_, idle_;
  std::deque<std::function<void()>> queue_;
  std::vector<std::thread> threads_;
  std::size_t queue_limit_;
  std::size_t running_ = 0;
  bool stopping_ = false;
  std::exception_ptr error_;
};

/// Processors that this process may use, at least 1.
std::size_t available_processors();

}  // namespace tessera
