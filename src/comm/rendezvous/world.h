#pragma once
// The group of all ranks, whether they are processes or threads.

#include <chrono>
#include <memory>
#include <string>

#include "comm/c10d.h"
#include "comm/rendezvous/liveness.h"
#include "tessera/comm/process_group.h"

namespace tessera::comm {

struct World {
  std::string backend = "gloo";
  int rank = 0, size = 1;
  std::chrono::milliseconds timeout{0};
  StorePtr store;
  std::shared_ptr<Liveness> liveness;
};

// Returns when all ranks have called it. Throws Error(rank_failure) if they do not.
ProcessGroup make_world(const World& world);

}  // namespace tessera::comm
