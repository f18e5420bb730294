#include "support/accelerator/schedule.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <map>

#include "support/accelerator/engine.h"

namespace tessera::sim {

namespace {

class Scheduler {
 public:
  Scheduler(const std::vector<TraceEntry>& trace, const Rates& rates)
      : trace_(trace), rates_(rates), intervals_(trace.size()) {
    for (std::size_t i = 0; i < trace.size(); ++i) {
      queues_[{trace[i].device, trace[i].stream}].tasks.push_back(i);
      if (trace[i].meeting != 0) ++meetings_[trace[i].meeting].missing;
      if (trace[i].name == "record") reached_[trace[i].point] = kNotYet;
    }
  }

  std::vector<Interval> run() {
    for (bool ran = true; ran;) {
      ran = false;
      for (auto& [stream, queue] : queues_) {
        while (queue.next < queue.tasks.size() && run_head(queue)) ran = true;
      }
    }
    for (const auto& [stream, queue] : queues_) {
      TORCH_CHECK(queue.next == queue.tasks.size(), "schedule: stream ", stream.id, " of device ", stream.device,
                  " never runs '", trace_[queue.tasks[queue.next]].name, "', expected a trace of all ranks");
    }
    return std::move(intervals_);
  }

 private:
  static constexpr double kNotYet = -1;
  struct Queue {
    std::vector<std::size_t> tasks;
    std::size_t next = 0;
    double now = 0;
    bool is_at_meeting = false;
  };
  struct Gathering {
    int missing = 0;
    double begin = 0;
  };

  // Returns false if the head depends on tasks that have not run.
  bool run_head(Queue& queue) {
    const std::size_t index = queue.tasks[queue.next];
    const TraceEntry& task = trace_[index];
    double begin = queue.now, seconds = 0;
    if (task.meeting != 0) {
      Gathering& meeting = meetings_[task.meeting];
      if (!queue.is_at_meeting) {
        queue.is_at_meeting = true;
        --meeting.missing;
        meeting.begin = std::max(meeting.begin, queue.now);
      }
      if (meeting.missing > 0) return false;
      queue.is_at_meeting = false;
      begin = meeting.begin;
      seconds = static_cast<double>(task.bytes) / rates_.link_bytes_per_second;
    } else if (task.name == "wait") {
      const auto point = reached_.find(task.point);
      const double reached = point == reached_.end() ? 0 : point->second;
      if (reached == kNotYet) return false;
      seconds = std::max(0.0, reached - begin);
    } else {
      seconds = std::max(static_cast<double>(task.bytes) / rates_.memory_bytes_per_second,
                         static_cast<double>(task.flops) / rates_.flops_per_second);
    }
    queue.now = begin + seconds;
    if (task.name == "record") reached_[task.point] = queue.now;
    intervals_[index] = {begin, queue.now};
    ++queue.next;
    return true;
  }

  const std::vector<TraceEntry>& trace_;
  const Rates& rates_;
  std::vector<Interval> intervals_;
  std::map<StreamKey, Queue> queues_;
  std::map<std::int64_t, double> reached_;  // seconds, by point
  std::map<std::int64_t, Gathering> meetings_;
};

}  // namespace

std::vector<Interval> schedule(const std::vector<TraceEntry>& trace, const Rates& rates) {
  return Scheduler(trace, rates).run();
}

std::vector<Interval> merged(std::vector<Interval> intervals) {
  std::erase_if(intervals, [](const Interval& interval) { return interval.seconds() <= 0; });
  std::sort(intervals.begin(), intervals.end(), [](const Interval& a, const Interval& b) { return a.begin < b.begin; });
  std::vector<Interval> result;
  for (const Interval& interval : intervals) {
    if (result.empty() || result.back().end < interval.begin) {
      result.push_back(interval);
    } else {
      result.back().end = std::max(result.back().end, interval.end);
    }
  }
  return result;
}

std::vector<Interval> difference(const std::vector<Interval>& intervals, const std::vector<Interval>& without) {
  const std::vector<Interval> holes = merged(without);
  std::vector<Interval> result;
  for (Interval rest : merged(intervals)) {
    for (const Interval& hole : holes) {
      if (hole.end <= rest.begin || hole.begin >= rest.end) continue;
      if (hole.begin > rest.begin) result.push_back({rest.begin, hole.begin});
      rest.begin = std::min(hole.end, rest.end);
    }
    if (rest.seconds() > 0) result.push_back(rest);
  }
  return result;
}

double common_seconds(const std::vector<Interval>& a, const std::vector<Interval>& b) {
  double seconds = 0;
  for (const Interval& x : merged(a)) {
    for (const Interval& y : merged(b)) seconds += std::max(0.0, std::min(x.end, y.end) - std::max(x.begin, y.begin));
  }
  return seconds;
}

double seconds_of(const std::vector<Interval>& intervals) {
  double seconds = 0;
  for (const Interval& interval : merged(intervals)) seconds += interval.seconds();
  return seconds;
}

}  // namespace tessera::sim
