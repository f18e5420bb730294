#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <limits>
#include <torch/csrc/distributed/c10d/ProcessGroupMPI.hpp>

#include "comm/backend/backend.h"
#include "tessera/base/error.h"

namespace tessera::comm {

namespace {

std::atomic<int> open_backends = 0;

// c10d finalizes MPI when the process exits. That waits for the collective that runs, and for the other processes to
// finalize. So a process that has not closed its backend, because a rank died or because it calls exit, does not.
void exit_without_finalizing(int status, void*) {
  if (open_backends == 0) return;
  std::cout.flush();
  std::cerr.flush();
  std::fflush(nullptr);
  ::_exit(status);
}

}  // namespace

// MPI has its own ranks and finds them without the store.
const MakeBackend make_mpi = [](const BackendOptions& options) -> Transport {
  BackendPtr backend = ::c10d::ProcessGroupMPI::createProcessGroupMPI();
  if (backend->getRank() != options.rank || backend->getSize() != options.size) {
    fail(ErrorCode::invalid_argument,
         "init process group: this is rank {} of {} for MPI, expected rank {} of {} as in the options; start the ranks "
         "with mpirun and set neither RANK nor WORLD_SIZE",
         backend->getRank(), backend->getSize(), options.rank, options.size);
  }
  // Registered after c10d's handler, so it runs before it.
  [[maybe_unused]] static const int registered = ::on_exit(exit_without_finalizing, nullptr);
  ++open_backends;
  return {"mpi", std::move(backend), std::numeric_limits<int>::max(), [] { --open_backends; }, true};
};

}  // namespace tessera::comm
