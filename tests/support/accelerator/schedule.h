#pragma once
// When the tasks of a trace run on devices with a clock, at assumed rates. Laws:
//
// - A stream runs its tasks in their order, each as soon as the one before it ends.
// - "wait" ends when its point is reached. A collective begins when all its ranks are at it, and ends for all at once.
// - A task takes bytes / memory rate or flops / flop rate, whichever is more; a collective, bytes / link rate.
// - The host has enqueued everything at time 0, and tasks of different streams do not slow each other down.

#include <cstdint>
#include <vector>

#include "support/accelerator/accelerator.h"

namespace tessera::sim {

struct Rates {
  double flops_per_second = 0;
  double memory_bytes_per_second = 0;
  double link_bytes_per_second = 0;
};

// A time [begin, end), in seconds.
struct Interval {
  double begin = 0, end = 0;
  double seconds() const { return end - begin; }
  friend bool operator==(const Interval&, const Interval&) = default;
};

// Returns when each task of `trace` runs. Points that the trace does not reach were reached before. Throws c10::Error
// if streams wait for each other, as in a trace that was taken too early.
std::vector<Interval> schedule(const std::vector<TraceEntry>& trace, const Rates& rates);

// Returns the union as intervals in their order that do not touch, without empty ones.
std::vector<Interval> merged(std::vector<Interval> intervals);
// Returns what is in the first union and not in the second, as merged() does.
std::vector<Interval> difference(const std::vector<Interval>& intervals, const std::vector<Interval>& without);
// Returns the time that is in both unions.
double common_seconds(const std::vector<Interval>& a, const std::vector<Interval>& b);
// Returns the time that is in the union.
double seconds_of(const std::vector<Interval>& intervals);

}  // namespace tessera::sim
