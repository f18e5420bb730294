#include "support/accelerator/engine.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <string_view>
#include <utility>

#include "support/accelerator/device.h"
#include "support/accelerator/ops/raw_tensor.h"
#include "tessera/base/function_ref.h"

namespace tessera::sim {

namespace {

constexpr std::chrono::seconds kDeadline(60);
constexpr int kQueriesUntilProgress = 100;

Order order_of_environment() {
  const char* value = std::getenv("TESSERA_SIM_ORDER");
  const std::string_view name = value == nullptr ? "late" : value;
  TORCH_CHECK(name == "late" || name == "early", "sim: TESSERA_SIM_ORDER is '", name, "', expected late or early");
  return name == "early" ? Order::early : Order::late;
}

}  // namespace

Engine& Engine::get() {
  static Engine& engine = *new Engine;
  return engine;
}

Engine::Engine() : order_(order_of_environment()), counts_(kDevices) {
  for (int d = 0; d < kDevices; ++d) last_stream_[d] = kPoolStreams;
}

void Engine::push(StreamKey stream, Task task) {
  queues_[stream].push_back(std::move(task));
  run_side_streams();
  changed_.notify_all();
}

void Engine::enqueue(StreamKey stream, std::string name, std::function<void()> run, Cost cost) {
  const Lock lock(mutex_);
  push(stream, {std::move(name), std::move(run), nullptr, nullptr, nullptr, 0, cost});
}

PointPtr Engine::push_point(StreamKey stream) {
  auto point = std::make_shared<Point>();
  point->stream = stream;
  point->number = ++last_point_;
  Task task{"record", {}, point, nullptr, nullptr};
  if (queues_[stream].empty()) {
    point->reached = true;
    trace(stream, task);
  } else {
    push(stream, std::move(task));
  }
  return point;
}

PointPtr Engine::record(StreamKey stream) {
  const Lock lock(mutex_);
  return push_point(stream);
}

void Engine::wait(StreamKey stream, const PointPtr& point) {
  if (point == nullptr || point->stream == stream || (point->reached && !is_traced_)) return;
  const Lock lock(mutex_);
  push(stream, {"wait", {}, nullptr, point, nullptr});
}

void Engine::meet(StreamKey stream, const MeetingPtr& meeting, std::size_t member, std::int64_t bytes) {
  const Lock lock(mutex_);
  meeting->streams[member] = stream;
  if (meeting->number == 0) meeting->number = ++last_meeting_;
  push(stream, {meeting->name, {}, nullptr, nullptr, meeting, member, {.bytes = bytes}});
}

void Engine::cancel(const MeetingPtr& meeting, std::size_t member) {
  const Lock lock(mutex_);
  meeting->is_cancelled[member] = true;
  changed_.notify_all();
}

bool Engine::is_done(const MeetingPtr& meeting) {
  const Lock lock(mutex_);
  return meeting->is_done;
}

bool Engine::query(const PointPtr& point) {
  if (point == nullptr || point->reached) return true;
  const Lock lock(mutex_);
  throw_failure();
  if (++point->queries > kQueriesUntilProgress) step(point->stream);
  return point->reached;
}

bool Engine::is_idle(StreamKey stream) {
  const Lock lock(mutex_);
  return queues_[stream].empty();
}

void Engine::count(int device, Kind kind) {
  Synchronizations& counts = counts_[static_cast<std::size_t>(device)];
  switch (kind) {
    case Kind::event:
      ++counts.event;
      break;
    case Kind::stream:
      ++counts.stream;
      break;
    case Kind::device:
      ++counts.device;
      break;
    case Kind::copy_to_host:
      ++counts.copy_to_host;
      break;
    case Kind::item:
      ++counts.item;
      break;
  }
}

void Engine::synchronize(const PointPtr& point, Kind kind) {
  if (point == nullptr) return;
  Lock lock(mutex_);
  count(point->stream.device, kind);
  run_until(lock, point);
}

void Engine::synchronize_stream(StreamKey stream, Kind kind) {
  Lock lock(mutex_);
  count(stream.device, kind);
  run_until(lock, push_point(stream));
}

void Engine::synchronize_device(int device) {
  Lock lock(mutex_);
  count(device, Kind::device);
  std::vector<StreamKey> streams;
  for (const auto& [stream, queue] : queues_) {
    if (stream.device == device) streams.push_back(stream);
  }
  std::vector<PointPtr> points;
  for (const StreamKey& stream : streams) points.push_back(push_point(stream));
  for (const PointPtr& point : points) run_until(lock, point);
}

StreamKey Engine::new_stream(int device) {
  const Lock lock(mutex_);
  return {device, ++last_stream_[device]};
}

void Engine::run_until(Lock& lock, const PointPtr& point) {
  auto deadline = std::chrono::steady_clock::now() + kDeadline;
  for (;;) {
    throw_failure();
    if (point->reached) return;
    if (step(point->stream)) {
      run_side_streams();
      changed_.notify_all();
      deadline = std::chrono::steady_clock::now() + kDeadline;
    } else {
      const std::deque<Task>& queue = queues_[point->stream];
      const bool in_time = changed_.wait_until(lock, deadline) == std::cv_status::no_timeout;
      TORCH_CHECK(in_time || point->reached, "sim: stream ", point->stream.id, " of device ", point->stream.device,
                  " made no progress for ", kDeadline.count(), " s at the task '",
                  queue.empty() ? std::string() : queue.front().name,
                  "': another rank has not called its collective, or streams wait for each other");
    }
  }
}

bool Engine::step(StreamKey stream) {
  Visited visited;
  return step(stream, visited);
}

bool Engine::step(StreamKey stream, Visited& visited) {
  if (std::find(visited.begin(), visited.end(), stream) != visited.end()) return false;
  visited.push_back(stream);
  const std::deque<Task>& queue = queues_[stream];
  if (queue.empty()) return false;
  const Task& head = queue.front();
  if (head.awaits != nullptr && !head.awaits->reached) return step(head.awaits->stream, visited);
  if (head.meeting != nullptr) return step_meeting(stream, head, visited);
  if (head.run) run(head.name, head.run);
  if (head.reaches != nullptr) head.reaches->reached = true;
  pop(stream);
  return true;
}

bool Engine::step_meeting(StreamKey stream, const Task& head, Visited& visited) {
  Meeting& meeting = *head.meeting;
  meeting.has_arrived[head.member] = true;
  if (!meeting.is_done && !meeting.is_cancelled[head.member]) {
    for (std::size_t i = 0; i < meeting.streams.size(); ++i) {
      if (meeting.is_cancelled[i]) return false;
      if (meeting.has_arrived[i]) continue;
      if (meeting.streams[i] && step(*meeting.streams[i], visited)) return true;
      if (!meeting.has_arrived[i]) return false;
    }
    run(meeting.name, meeting.run);
    meeting.is_done = true;
  }
  pop(stream);
  return true;
}

void Engine::pop(StreamKey stream) {
  std::deque<Task>& queue = queues_[stream];
  trace(stream, queue.front());
  queue.pop_front();
}

void Engine::trace(StreamKey stream, const Task& task) {
  if (!trace_) return;
  const PointPtr& point = task.reaches != nullptr ? task.reaches : task.awaits;
  trace_->push_back({stream.device, stream.id, task.name, point == nullptr ? 0 : point->number,
                     task.meeting == nullptr ? 0 : task.meeting->number, task.cost.bytes, task.cost.flops, task.text});
}

void Engine::run(const std::string& name, FunctionRef<void()> function) {
  if (!failure_.empty()) return;
  try {
    const PlainDispatch plain;
    function();
  } catch (const c10::Error& error) {
    failure_ = name + ": " + error.what_without_backtrace();
  } catch (const std::exception& error) {
    failure_ = name + ": " + error.what();
  }
}

void Engine::run_side_streams() {
  if (order_ != Order::early) return;
  for (bool ran = true; ran;) {
    ran = false;
    std::vector<StreamKey> streams;
    for (const auto& [stream, queue] : queues_) {
      if (stream.id != 0 && !queue.empty()) streams.push_back(stream);
    }
    for (const StreamKey& stream : streams) {
      while (step(stream)) ran = true;
    }
  }
}

void Engine::throw_failure() const { TORCH_CHECK(failure_.empty(), "sim: a task failed: ", failure_); }

Synchronizations Engine::counts(int device) {
  const Lock lock(mutex_);
  return counts_.at(static_cast<std::size_t>(device));
}

void Engine::reset_counts(int device) {
  const Lock lock(mutex_);
  counts_.at(static_cast<std::size_t>(device)) = {};
}

void Engine::start_trace() {
  const Lock lock(mutex_);
  trace_.emplace();
  is_traced_ = true;
}

void Engine::note(StreamKey stream, const std::string& text) {
  const Lock lock(mutex_);
  if (trace_) push(stream, {"note", {}, nullptr, nullptr, nullptr, 0, {}, text});
}

std::vector<TraceEntry> Engine::take_trace() {
  const Lock lock(mutex_);
  is_traced_ = false;
  return std::exchange(trace_, std::nullopt).value_or(std::vector<TraceEntry>());
}

}  // namespace tessera::sim
