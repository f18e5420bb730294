#pragma once
// Finds out whether all ranks of a group can share memory, and makes the group communicate through it.

#include "comm/group_impl.h"

namespace tessera::comm {

// If all ranks of a host can share memory, the group carries tensors on the CPU and comparisons of calls through it
// from now on; between hosts, which must have equal numbers of ranks, c10d carries them. All ranks of the group call
// it. Throws the errors of a collective.
//
// Ranks of a host are those with one kernel and one network namespace; they need no right and may have different users
// and PID namespaces. TESSERA_HOST_MEMORY=0 in the environment of any rank keeps the group on c10d; with another value,
// only ranks with the same value share memory, for example those of a NUMA node.
void use_host_memory(const GroupPtr& group);

}  // namespace tessera::comm
