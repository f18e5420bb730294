#pragma once
/// \file
/// Ranks as threads of this process, for tests, examples and small work.

#include <chrono>
#include <functional>

#include "tessera/comm/process_group.h"

namespace tessera {

struct LocalOptions {
  std::chrono::milliseconds timeout = std::chrono::minutes(5);
};

/// Runs `f` on `ranks` threads, each with its rank of one group over Gloo, and returns when all have returned. If one
/// throws, the others get `Error(rank_failure)` from the collective that they wait in, and what the first one threw is
/// thrown here. `ranks` >= 1, `Error(invalid_argument)` otherwise.
void run_local(int ranks, const std::function<void(const ProcessGroup& group)>& f, const LocalOptions& options = {});

}  // namespace tessera
