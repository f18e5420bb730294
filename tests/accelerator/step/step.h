#pragma once
// A training step of FSDP as a trace of the simulated accelerator, and when its work runs at assumed rates
// (schedule.h).

#include <cstdint>
#include <vector>

#include "support/accelerator/schedule.h"

namespace tessera::fsdp {

// Rates of no device in particular: products in float32 on a GPU of a data center, and 100 Gbit/s between ranks.
inline constexpr sim::Rates kStepRates{
    .flops_per_second = 10e12, .memory_bytes_per_second = 1e12, .link_bytes_per_second = 12.5e9};

// What is trained: by AdamW, in float32, with full_shard. The units are the blocks and the model itself, which has the
// layer after them.
struct StepModel {
  int ranks = 2;
  int blocks = 6;            // of two linear layers, width x (2 width + 1) and back
  std::int64_t width = 256;  // of the batch too
  std::int64_t rows = 1024;  // of the batch of a rank
  bool prefetches = true;
};

// Returns what all ranks run in the third step, when the order of the units is known. The notes are "forward <unit>",
// "backward <unit>" and "optimizer"; units are numbered as in Work.
std::vector<sim::TraceEntry> trace_step(const StepModel& model);

// Tasks that follow each other on a stream.
struct Work {
  enum class Kind { forward, backward, optimizer, gather, reduction, other };
  Kind kind = Kind::other;
  int unit = -1;            // the block; the number of blocks for the model's own unit, -1 for none
  std::int64_t stream = 0;  // that runs it; of a collective, the stream that waits for it
  sim::Interval time;
};

// What rank 0 does in a step.
struct Step {
  std::vector<Work> work;  // of a stream in its order
  double seconds = 0;
  // Communication while the stream of the computation waits.
  std::vector<sim::Interval> exposed;
  double exposed_share() const { return sim::seconds_of(exposed) / seconds; }
};

Step schedule_step(const StepModel& model, const sim::Rates& rates);

}  // namespace tessera::fsdp
