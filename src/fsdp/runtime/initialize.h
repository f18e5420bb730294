#pragma once
// Initialization of a unit's parameters and buffers before they are sharded.

#include <span>

#include "fsdp/runtime/find_units.h"

namespace tessera::fsdp {

// Returns the device on which the unit computes.
at::Device device_of(const FoundUnit& unit, const Options& options);

// Materializes parameters and buffers on meta, moves buffers to the device, and broadcasts the values of rank 0 if the
// options ask for it. A collective of `group` and of `all_groups`. Throws Error(invalid_argument) on all ranks if a
// tensor is on meta and there is no param_init_fn.
void initialize(const FoundUnit& unit, const ProcessGroup& group, std::span<const ProcessGroup> all_groups,
                const Options& options);

}  // namespace tessera::fsdp
