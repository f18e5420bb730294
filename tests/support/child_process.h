#pragma once
// Processes that a test forks, signals and waits for.

#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <stdexcept>

#include "tessera/base/function_ref.h"

namespace tessera::testing {

// Starts a process that runs `f` and ends with status 0, or with 1 if it throws. Never returns a pid that kill() takes
// for all processes.
inline pid_t start_child(FunctionRef<void()> f) {
  const pid_t pid = ::fork();
  if (pid < 0) throw std::runtime_error("fork");
  if (pid > 0) return pid;
  try {
    f();
  } catch (...) {
    ::_exit(1);
  }
  ::_exit(0);
}

// Waits for the process to end and returns the status of waitpid.
inline int wait_for_child(pid_t pid) {
  int status = 0;
  if (::waitpid(pid, &status, 0) != pid) throw std::runtime_error("waitpid");
  return status;
}

}  // namespace tessera::testing
