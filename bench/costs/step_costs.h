#pragma once
// What a training step costs beside its time. In a program that links step_costs.cpp, posix_memalign, from which
// LibTorch has the memory of CPU tensors, counts.

#include <cstdint>

#include "tessera/base/function_ref.h"

namespace tessera::bench {

// Of this process.
struct StepCosts {
  std::int64_t allocations = 0, allocated_bytes = 0;  // of CPU tensors
  std::int64_t copied_bytes = 0;                      // by copy_, which clone, contiguous and to call
  std::int64_t page_faults = 0;                       // memory that is touched for the first time, a page each
};

// Calls `step` and counts what it costs. Other threads that compute at the same time are counted, too.
StepCosts costs_of(FunctionRef<void()> step);

}  // namespace tessera::bench
