#pragma once
// What a unit's parameters and buffers are before they are sharded.

#include "fsdp/runtime/find_units.h"

namespace tessera::fsdp {

// Where the unit computes.
at::Device device_of(const FoundUnit& unit, const Options& options);

// Materialises what is on meta, and makes everything rank 0's if the options say so. A collective. Throws
// Error(invalid_argument) on all ranks for parameters on meta that nothing initialises.
void initialize(const FoundUnit& unit, const ProcessGroup& group, const Options& options);

}  // namespace tessera::fsdp
