#include "cli/text/help.h"

#include <fmt/format.h>

#include <algorithm>

namespace tessera::cli {
namespace {

constexpr std::size_t kHelpColumn = 26;

std::string row(std::string_view left, std::string_view help) {
  std::string text = fmt::format("  {}", left);
  if (text.size() + 2 > kHelpColumn) {
    text += "\n" + std::string(kHelpColumn, ' ');
  } else {
    text.resize(kHelpColumn, ' ');
  }
  return text + filled(help, kHelpColumn) + "\n";
}

std::string rows(std::string_view title, const std::vector<Option>& options, bool positional) {
  std::string text;
  const auto add = [&](const Option& option) {
    std::string left = names_of(option);
    if (!option.value_name.empty()) left += fmt::format(" {}", option.value_name);
    text += row(left, help_of(option));
  };
  if (!positional) add(help_option());
  for (const Option& option : options) {
    if (option.positional == positional) add(option);
  }
  return text.empty() ? text : fmt::format("\n{}:\n{}", title, text);
}

std::string examples_of(const std::vector<std::string_view>& examples) {
  std::string text = examples.size() == 1 ? "\nExample:\n" : "\nExamples:\n";
  for (const std::string_view example : examples) text += fmt::format("  {}\n", example);
  return text;
}

}  // namespace

std::string filled(std::string_view text, std::size_t indent, std::size_t columns) {
  std::string lines;
  std::size_t used = indent;
  while (!text.empty()) {
    const std::string_view word = text.substr(0, text.find(' '));
    text.remove_prefix(std::min(text.size(), word.size() + 1));
    if (used > indent && used + 1 + word.size() > columns) {
      lines += "\n" + std::string(indent, ' ');
      used = indent;
    } else if (used > indent) {
      lines += ' ';
      ++used;
    }
    lines += word;
    used += word.size();
  }
  return lines;
}

const Option& help_option() {
  static bool ignored = false;
  static const Option option = {.name = "help", .letter = 'h', .help = "Print this help and exit", .target = &ignored};
  return option;
}

std::string alias_sentence(const Command& command) {
  return fmt::format("'tessera {}' is the same command.", command.alias);
}

std::string names_of(const Option& option) {
  if (option.positional) return fmt::format("{}{}", option.name, option.is_list() ? " ..." : "");
  return option.letter == '\0' ? fmt::format("--{}", option.name)
                               : fmt::format("-{}, --{}", option.letter, option.name);
}

std::string help_of(const Option& option) {
  return option.default_text.empty() ? std::string(option.help)
                                     : fmt::format("{} (default: {})", option.help, option.default_text);
}

std::string usage_of(const std::vector<Option>& options) {
  std::string text = "[OPTIONS]";
  for (const Option& option : options) {
    if (!option.positional) continue;
    const std::string name = fmt::format("{}{}", option.name, option.is_list() ? "..." : "");
    text += option.required ? " " + name : " [" + name + "]";
  }
  return text;
}

std::string command_help(const Command& command) {
  std::string text =
      fmt::format("{}\nUsage: tessera {} {}\n", command.summary, command.name, usage_of(command.options));
  text += rows("Arguments", command.options, true);
  text += rows("Options", command.options, false);
  if (!command.details.empty()) text += "\n" + filled(command.details, 0) + "\n";
  if (!command.alias.empty()) text += "\n" + alias_sentence(command) + "\n";
  return text + examples_of(command.examples);
}

std::string program_help(const Program& program) {
  std::string text = fmt::format("{}\nUsage: tessera [OPTIONS] COMMAND\n", program.summary);
  text += rows("Options", program.options, false);
  text += "\nCommands:\n";
  for (const Command& command : program.commands) text += row(command.name, command.summary);
  text += "\nExit status:\n";
  for (std::size_t status = 0; status < program.exit_statuses.size(); ++status) {
    text += row(std::to_string(status), program.exit_statuses[status]);
  }
  text += "\n" + filled(program.details, 0) + "\n'tessera COMMAND --help' has the options of a command.\n";
  return text + examples_of(program.examples);
}

}  // namespace tessera::cli
