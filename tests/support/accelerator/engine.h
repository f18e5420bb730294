#pragma once
// The streams of all devices and the tasks on them.
//
// A stream is a queue of tasks. A task runs a function, marks a point as reached, waits for a point of another stream,
// or meets tasks of other streams (a collective). Nothing runs when it is enqueued, except in the order `early`
// (accelerator.h). A thread that synchronizes runs the tasks that it waits for, and those of other streams that these
// wait for, under the one mutex of the engine. So tasks must not call the engine, nor allocate or free memory of a
// device.
//
// A task that throws is a failure of the process, as an error in a CUDA kernel is: every later synchronization throws
// it.

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "support/accelerator/accelerator.h"
#include "tessera/base/function_ref.h"

namespace tessera::sim {

// Stream `id` of a device; 0 is the default stream.
struct StreamKey {
  int device = 0;
  std::int64_t id = 0;
  friend auto operator<=>(const StreamKey&, const StreamKey&) = default;
};

// A place in the queue of a stream. It is reached when all tasks before it ran.
struct Point {
  StreamKey stream;
  std::int64_t number = 0;  // from 1 on
  std::atomic<bool> reached = false;
  int queries = 0;  // guarded by the engine's mutex
};
using PointPtr = std::shared_ptr<Point>;

// Tasks of several streams that run as one, when all of them are at the heads of their queues.
struct Meeting {
  explicit Meeting(std::string title, std::size_t size)
      : name(std::move(title)), streams(size), has_arrived(size), is_cancelled(size) {}
  std::string name;
  std::function<void()> run;  // set before the last member is enqueued
  // Guarded by the engine's mutex.
  std::int64_t number = 0;                        // from 1 on
  std::vector<std::optional<StreamKey>> streams;  // by member, from the time when its task was enqueued
  std::vector<bool> has_arrived;                  // whether its task is at the head
  std::vector<bool> is_cancelled;
  bool is_done = false;
};
using MeetingPtr = std::shared_ptr<Meeting>;

// What a task costs, for the trace alone; see TraceEntry.
struct Cost {
  std::int64_t bytes = 0, flops = 0;
};

class Engine {
 public:
  // What a synchronization is counted as.
  enum class Kind { event, stream, device, copy_to_host, item };

  static Engine& get();

  void enqueue(StreamKey stream, std::string name, std::function<void()> run, Cost cost = {});
  // Enqueues a point.
  PointPtr record(StreamKey stream);
  // Makes what is enqueued on `stream` from now on wait for `point`. Null is reached.
  void wait(StreamKey stream, const PointPtr& point);
  void meet(StreamKey stream, const MeetingPtr& meeting, std::size_t member, std::int64_t bytes);

  // Ends the task of a member without the others, whose tasks never run then.
  void cancel(const MeetingPtr& meeting, std::size_t member);
  bool is_done(const MeetingPtr& meeting);

  // Whether `point` is reached. A program that asks again and again makes progress, as on a device: after 100 times,
  // each call runs a task that the point depends on.
  bool query(const PointPtr& point);
  bool is_idle(StreamKey stream);

  // Runs what `point` depends on. If another rank has to call a collective first, blocks until it did, for 60 seconds
  // at most; then throws c10::Error, as it does for a task that failed.
  void synchronize(const PointPtr& point, Kind kind);
  void synchronize_stream(StreamKey stream, Kind kind);
  void synchronize_device(int device);

  // Returns a stream that no one else has.
  StreamKey new_stream(int device);

  Order order() const { return order_; }
  void set_order(Order order) { order_ = order; }
  Synchronizations counts(int device);
  void reset_counts(int device);
  void start_trace();
  void note(StreamKey stream, const std::string& text);
  std::vector<TraceEntry> take_trace();

 private:
  struct Task {
    std::string name;
    std::function<void()> run;
    PointPtr reaches, awaits;
    MeetingPtr meeting;
    std::size_t member = 0;
    Cost cost = {};
    std::string text = {};
  };
  using Lock = std::unique_lock<std::mutex>;
  using Visited = std::vector<StreamKey>;

  Engine();
  void push(StreamKey stream, Task task);
  PointPtr push_point(StreamKey stream);
  void count(int device, Kind kind);
  // Runs tasks until `point` is reached.
  void run_until(Lock& lock, const PointPtr& point);
  // Runs one task of `stream`, or one that its head depends on. Returns false if that is not possible now.
  bool step(StreamKey stream, Visited& visited);
  bool step(StreamKey stream);
  bool step_meeting(StreamKey stream, const Task& head, Visited& visited);
  void pop(StreamKey stream);
  void trace(StreamKey stream, const Task& task);
  void run(const std::string& name, FunctionRef<void()> function);
  // In the order `early`, runs the side streams as far as possible.
  void run_side_streams();
  void throw_failure() const;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<StreamKey, std::deque<Task>> queues_;
  std::map<int, std::int64_t> last_stream_;
  std::atomic<Order> order_;
  std::vector<Synchronizations> counts_;
  std::int64_t last_point_ = 0, last_meeting_ = 0;
  std::optional<std::vector<TraceEntry>> trace_;
  std::atomic<bool> is_traced_ = false;  // whether there is a trace
  std::string failure_;
};

}  // namespace tessera::sim
