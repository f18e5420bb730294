#pragma once
// Texts that are generated from the tables of commands when tessera is built.

#include <string>
#include <string_view>

#include "cli/command.h"

namespace tessera::cli {

// Man pages, in the macros of man(7). `version` is printed in the footer.
std::string program_page(const Program& program, std::string_view version);
std::string command_page(const Program& program, const Command& command, std::string_view version);

// Completion scripts.
std::string bash_completion(const Program& program);
std::string zsh_completion(const Program& program);
std::string fish_completion(const Program& program);

}  // namespace tessera::cli
