#pragma once
// Waiting for c10d's work.

#include <chrono>

#include "comm/c10d.h"

namespace tessera::comm {

// Waits for at most `limit` and returns whether the work has ended. Throws the error of the work.
bool wait_for(::c10d::Work& work, std::chrono::milliseconds limit);

}  // namespace tessera::comm
