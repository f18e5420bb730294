#pragma once
// The command line, parsed by the tables of command.h.

#include <string>

#include "cli/command.h"

namespace tessera::cli {

struct CommandLine {
  const Command* command = nullptr;  // the one that is named; null if there is none
  bool wants_help = false;           // --help of the command, or of the program if there is none
  std::string error;                 // what is invalid; empty if nothing is
};

// Stores the values in the options' targets. They are unspecified after an error.
CommandLine parse(const Program& program, int argc, char** argv);

}  // namespace tessera::cli
