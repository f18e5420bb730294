#pragma once
// Waiting for what c10d has begun.

#include <chrono>

#include "comm/c10d.h"

namespace tessera::comm {

// Waits for `limit` at most. Whether it has ended; throws what went wrong with it.
bool wait_for(::c10d::Work& work, std::chrono::milliseconds limit);

}  // namespace tessera::comm
