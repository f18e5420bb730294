#pragma once
// Signals that interrupt the command.

#include "tessera/base/cancellation.h"

namespace tessera::cli {

// Installs signal handlers. After the call, the first SIGINT, SIGTERM or SIGHUP requests the operation to stop and
// clean up; a second one ends the process at once. A write to a closed pipe is an error (EPIPE) and not a signal.
const Cancellation& watch_signals();
// Returns the same request, and installs nothing.
const Cancellation& interruption();

}  // namespace tessera::cli
