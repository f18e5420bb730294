#include <torch/csrc/distributed/c10d/ProcessGroupMPI.hpp>

#include "comm/backend/backend.h"

namespace tessera::comm {

// MPI has its own ranks: rank, size and store are not used.
const MakeBackend make_mpi = [](const BackendOptions&) -> BackendPtr {
  return ::c10d::ProcessGroupMPI::createProcessGroupMPI();
};

}  // namespace tessera::comm
