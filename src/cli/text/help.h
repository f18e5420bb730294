#pragma once
// What --help prints.

#include <string>
#include <string_view>
#include <vector>

#include "cli/command.h"

namespace tessera::cli {

std::string program_help(const Program& program);
std::string command_help(const Command& command);

// The option that every command has.
const Option& help_option();

// "[OPTIONS] CKPT [FQN...]"
std::string usage_of(const std::vector<Option>& options);

// "'tessera ls' is the same command.", of a command with an alias.
std::string alias_sentence(const Command& command);

// "-o, --output"; the bare name of a positional argument.
std::string names_of(const Option& option);

// Phrase and default: "Number of threads that read and write (default: one per processor)".
std::string help_of(const Option& option);

// `text` as lines of at most `columns`, each after the first with `indent` spaces in front; the first line is taken to
// have as many characters in front of it.
std::string filled(std::string_view text, std::size_t indent, std::size_t columns = 100);

}  // namespace tessera::cli
