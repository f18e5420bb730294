#pragma once
/// \file
/// Ranks as threads of this process, for tests, examples and small jobs.

#include <chrono>
#include <string>

#include "tessera/base/function_ref.h"
#include "tessera/comm/process_group.h"

namespace tessera {

/// Options of `run_local`.
struct LocalOptions {
  std::chrono::milliseconds timeout = std::chrono::minutes(5);
  /// "gloo", or a backend whose ranks may be threads; see `available_backends`. With "nccl", each rank selects a device
  /// of its own.
  std::string backend = "gloo";
};

/// Runs `f` on `ranks` threads, each of which is one rank of a group, and returns when all have returned. If a
/// rank throws, the others get `Error(rank_failure)` from the collective that they are waiting in, and the first
/// exception is rethrown here. Throws `Error(invalid_argument)` if `ranks` < 1 or the timeout is not positive, and
/// `Error(io)` if the system has no threads for all ranks; then ranks that run get `Error(rank_failure)`, too.
void run_local(int ranks, FunctionRef<void(const ProcessGroup& group)> f, const LocalOptions& options = {});

}  // namespace tessera
