#pragma once
// How the ranks of one start of a program find each other in a store that outlives them. torchrun's agent keeps its
// store when it restarts the ranks, so it has keys of ranks that are gone. Its counter of restarts does not tell the
// starts apart: each host has its own, and a host that joins or leaves does not count.

#include <chrono>
#include <string>

#include "comm/c10d.h"

namespace tessera::comm {

// Returns a name that only the ranks of this start know, the same on each, when all ranks have called it. Throws
// Error(rank_failure) naming the ranks that have not done so within the timeout.
std::string meet(::c10d::Store& store, int rank, int size, std::chrono::milliseconds timeout);

}  // namespace tessera::comm
