#pragma once
// Ctrl-C and SIGTERM.

#include "tessera/base/cancellation.h"

namespace tessera::cli {

// From now on the first SIGINT, SIGTERM or SIGHUP is a request to stop, so that the operation can clean up; the second
// one ends the process at once. A write to a closed pipe is an error (EPIPE) and no signal.
const Cancellation& watch_signals();

}  // namespace tessera::cli
