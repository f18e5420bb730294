#pragma once
/// \file
/// How ranks find each other: through the environment that a launcher gives them, or through explicit options.
///
/// Nothing global is kept: who needs the group is given it. Where SIGPIPE has its default action, it is ignored from
/// the first group on: a rank must outlive those that it writes to. PyTorch: torch/distributed/rendezvous.py.

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>

#include "tessera/comm/process_group.h"

namespace tessera {

struct InitOptions {
  /// "gloo", "nccl" or "mpi", of those that the LibTorch here has.
  std::string backend = "gloo";
  int rank = 0;
  int world_size = 1;
  /// Where rank 0 keeps the store through which ranks find each other.
  std::string master_addr = "127.0.0.1";
  std::uint16_t master_port = 29500;
  /// How long a rank waits for the others in a collective, and when they meet first.
  std::chrono::milliseconds timeout = std::chrono::minutes(30);
  /// A rank of which nothing was heard for so long is dead.
  std::chrono::milliseconds liveness = std::chrono::seconds(10);
};

/// Looks up a variable, null if it isn't set; `std::getenv` does.
using Environment = std::function<const char*(const char* name)>;

/// Rank, world size and address as the launcher says them, the first of these whose variables are set:
///   torchrun, `tessera run`   RANK, WORLD_SIZE
///   Open MPI's mpirun         OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE
///   MPICH's, Intel's mpirun   PMI_RANK, PMI_SIZE
///   srun                      SLURM_PROCID, SLURM_NTASKS (of a step; SLURM_STEP_NODELIST's first host is the master)
///   none                      one rank
/// MASTER_ADDR and MASTER_PORT count for all; without MASTER_ADDR the ranks must be on one host, but under srun. Throws
/// `Error(invalid_argument)` naming the variable that is missing, no number, or out of range.
InitOptions options_from_environment(const Environment& environment);
InitOptions options_from_environment();

/// The backends that the LibTorch here has: "gloo", "nccl", "mpi".
std::vector<std::string> available_backends();

/// Meets the other ranks. A world of one rank needs no network. Throws `Error(invalid_argument)` for options that can't
/// be meant, `Error(unsupported)` for a backend that isn't there, and `Error(rank_failure)` if the others haven't come
/// within the timeout.
ProcessGroup init_process_group(const InitOptions& options = options_from_environment());

}  // namespace tessera
