#pragma once
/// \file
/// A thread pool with a bounded queue.
///
/// Laws: at most `threads` tasks run and at most `queue_limit` tasks wait. Beyond that `submit` blocks, so the memory
/// held by tasks is bounded. After a task throws, tasks that have not begun are dropped, and `submit` and `wait` throw
/// the first task's exception.

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace tessera {

/// A fixed number of threads that begin tasks in order of submission.
class ThreadPool {
 public:
  /// `threads` >= 1. A `queue_limit` of 0 means the number of threads. If the system refuses some of the threads, the
  /// pool has fewer; if it refuses all, throws `Error(io)`.
  explicit ThreadPool(std::size_t threads, std::size_t queue_limit = 0);
  /// Drops tasks that have not begun and waits for running tasks.
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  /// Queues `task`. Blocks while the queue is full. Throws the exception of an earlier task that failed.
  void submit(std::function<void()> task);
  /// Blocks until all tasks have ended. Throws the first exception. The pool can be used again only if no task threw.
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

/// Returns the number of processors that this process may use, at least 1.
std::size_t available_processors();

/// Returns the number of threads of an operation on files: `jobs`, or if that is 0, one per processor, at least 4 and
/// at most 16. Reading and writing wait for the disk more than for the processor, so small machines get a few extra
/// threads.
std::size_t threads_for(std::size_t jobs);

}  // namespace tessera
