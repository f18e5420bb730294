#pragma once
/// \file
/// Initialization of process groups, from the environment that a launcher sets or from explicit options.
///
/// There is no global group: pass the group to the functions that need it. If SIGPIPE has its default action, the first
/// group sets it to be ignored, because a rank must survive the death of the ranks that it writes to. PyTorch:
/// torch/distributed/rendezvous.py.

#include <chrono>
#include <cstdint>
#include <string>

#include "tessera/base/function_ref.h"
#include "tessera/comm/process_group.h"

namespace tessera {

/// The rank of this process, the address of rank 0, and the timeouts of the group.
struct InitOptions {
  /// "gloo", "nccl" or "mpi"; see `available_backends`.
  std::string backend = "gloo";
  int rank = 0;
  int world_size = 1;
  /// Where rank 0 runs the store through which ranks find each other.
  std::string master_addr = "127.0.0.1";
  std::uint16_t master_port = 29500;
  /// Whether torchrun's agent runs the store at this address. Otherwise rank 0 does.
  bool agent_store = false;
  /// How long a rank waits for the others, in a collective and when the group is initialized. More than a year is taken
  /// for a year, here and below.
  std::chrono::milliseconds timeout = std::chrono::minutes(30);
  /// A rank that shows no sign of life for this long is considered dead.
  std::chrono::milliseconds liveness = std::chrono::seconds(10);
};

/// Looks up a variable, as `std::getenv` does; null if it is not set. A reference to the function, which must exist.
using Environment = FunctionRef<const char*(const char* name)>;

/// Reads rank, world size and address from the variables of the launcher: the first of these whose variables are set.
///   torchrun, `tessera run`   RANK, WORLD_SIZE
///   Open MPI's mpirun         OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE
///   MPICH's, Intel's mpirun   PMI_RANK, PMI_SIZE
///   srun                      SLURM_PROCID, SLURM_STEP_NUM_TASKS or SLURM_NTASKS
///
/// Without any of them there is one rank.
/// MASTER_ADDR and MASTER_PORT override the address for all launchers. Without MASTER_ADDR all ranks must be on one
/// host, except under srun, where rank 0's host is the first of SLURM_STEP_NODELIST. Without MASTER_PORT, the port
/// follows from the job under srun and Open MPI's mpirun. TORCHELASTIC_USE_AGENT_STORE sets `agent_store`.
/// Throws `Error(invalid_argument)` naming a variable that is missing, not a number, or out of range, or two that
/// contradict each other: RANK and WORLD_SIZE that were not set for the launcher that started this rank.
InitOptions options_from_environment(Environment environment);
InitOptions options_from_environment();

/// Returns the backends of the LibTorch in use: "gloo", "nccl", "mpi".
std::vector<std::string> available_backends();

/// Connects to the other ranks. A world of one rank needs no network. Throws `Error(invalid_argument)` for invalid
/// options, `Error(unsupported)` for a backend that LibTorch lacks, and `Error(rank_failure)` if the other ranks do not
/// connect within the timeout.
ProcessGroup init_process_group(const InitOptions& options = options_from_environment());

}  // namespace tessera
