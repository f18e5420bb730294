#pragma once
// Initialization of a unit's parameters and buffers before they are sharded.

#include <exception>
#include <span>

#include "fsdp/runtime/find_units.h"

namespace tessera::fsdp {

// Returns the device on which the unit computes.
at::Device device_of(const FoundUnit& unit, const Options& options);

// Materializes parameters and buffers on meta, moves buffers to the device, and broadcasts the values of rank 0 if the
// options ask for it. A collective of the unit's group and of `agreeing_groups`. Throws Error(invalid_argument) on all
// ranks of these if a tensor is on meta that nothing initializes, and `failure` of an earlier unit if there is one
// on any of them.
void initialize(const FoundUnit& unit, std::span<const ProcessGroup> agreeing_groups, const Options& options,
                const std::exception_ptr& failure);

}  // namespace tessera::fsdp
