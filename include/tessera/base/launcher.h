#pragma once
/// \file
/// Runs a program as several ranks on this machine, as torchrun does on one node.
///
/// Each rank's environment has RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT. It also has
/// OMP_NUM_THREADS, unless that is set already, chosen so that all ranks together have as many threads as this process
/// may use processors. Rank 0 inherits this process's standard input unless that is a terminal; the other ranks have
/// none.
///
/// If a rank fails, the other ranks get SIGTERM, and SIGKILL after `grace`. So do processes that a rank started and
/// left running in its process group. If this process is killed, the ranks are killed too.

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

/// The program to run as ranks, and its options.
struct LaunchOptions {
  int ranks = 1;
  std::vector<std::string> command;  ///< the program, looked up in PATH, and its arguments
  std::string master_addr = "127.0.0.1";
  std::uint16_t master_port = 0;  ///< 0: any free port
  std::chrono::milliseconds grace = std::chrono::seconds(5);
  /// Receives the output of the ranks line by line, including the newline. The last line may lack it, and a line of
  /// more than 64 KiB arrives in parts. Another thread than that of the caller calls it, for one line at a time; while
  /// it blocks, the ranks wait when they have filled their pipes. If it throws, the ranks are killed and the exception
  /// is rethrown.
  std::function<void(int rank, bool is_standard_error, std::string_view line)> output;
};

/// How the ranks ended.
struct LaunchResult {
  int status =
      0;          ///< exit status of the rank that failed first, 128 + the signal's number if a signal ended it; else 0
  int rank = -1;  ///< the rank that failed first; -1 if none did
  std::string how;  ///< "exited with status 3", "was ended by signal 11 (Segmentation fault)"
};

/// Runs the ranks. Blocks until all of them have ended and all of their output has been delivered, however slowly
/// `output` takes it. It waits for the output of processes that left a rank's process group until `grace` after the
/// last rank has ended.
///
/// While it runs, SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1 and SIGUSR2 sent to this process are forwarded to the ranks
/// instead of being handled. A second SIGINT or SIGTERM kills the ranks, and a third one this process. Only one thread
/// may call it at a time.
///
/// Throws `Error(invalid_argument)` without a rank or a command, `Error(not_found)` if the program does not exist, and
/// `Error(io)` if it cannot be run or the system has no more processes. In each case no rank is left running.
LaunchResult launch_ranks(const LaunchOptions& options);

}  // namespace tessera
