#pragma once
/// \file
/// Runs a program as several ranks on this machine, as torchrun does on one node.
///
/// Each rank is told RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and OMP_NUM_THREADS
/// unless that is set, so that together they have as many threads as there are processors. Rank 0 has this process's
/// standard input, unless that is a terminal; the others have none.
///
/// One rank fails, all end: the others get SIGTERM, and SIGKILL after `grace`. So do processes that a rank started and
/// left behind in its process group when it ended. If this process is killed, the ranks are, too.

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

struct LaunchOptions {
  int ranks = 1;
  std::vector<std::string> command;  ///< the program, found by PATH, and its arguments
  std::string master_addr = "127.0.0.1";
  std::uint16_t master_port = 0;  ///< 0: one that is free now
  std::chrono::milliseconds grace = std::chrono::seconds(5);
  /// Gets what the ranks write, line by line, the newline included; a last line may lack it, and one of more than 64
  /// KiB comes in parts. An exception of it ends the ranks and is passed on.
  std::function<void(int rank, bool is_standard_error, std::string_view line)> output;
};

struct LaunchResult {
  int status = 0;   ///< exit status of the rank that failed first, 128 + the signal's number if one ended it; else 0
  int rank = -1;    ///< the rank that failed first; -1 if none did
  std::string how;  ///< "exited with status 3", "was ended by signal 11 (Segmentation fault)"
};

/// Returns when all ranks have ended and all that they wrote has been passed on. Meanwhile SIGINT, SIGTERM, SIGHUP,
/// SIGQUIT, SIGUSR1 and SIGUSR2 that this process gets are passed on to the ranks instead of doing what they did; a
/// second SIGINT or SIGTERM kills the ranks. Not to be called by several threads at once. Throws
/// `Error(invalid_argument)` without a rank or a command, `Error(not_found)` for a program that isn't there,
/// `Error(io)` for one that can't be run and where the system has no more processes; then no rank is left.
LaunchResult launch_ranks(const LaunchOptions& options);

}  // namespace tessera
