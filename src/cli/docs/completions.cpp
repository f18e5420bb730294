#include <fmt/format.h>

#include <string>
#include <variant>
#include <vector>

#include "cli/docs/docs.h"
#include "cli/text/help.h"

namespace tessera::cli {
namespace {

bool is_flag(const Option& option) { return std::holds_alternative<bool*>(option.target); }

// "-o --output"
std::string flags_of(const Option& option) {
  return option.letter == '\0' ? fmt::format("--{}", option.name) : fmt::format("-{} --{}", option.letter, option.name);
}

std::string flags_of(const std::vector<Option>& options) {
  std::string text;
  for (const Option& option : options) {
    if (!option.positional) text += flags_of(option) + " ";
  }
  return text + flags_of(help_option());
}

// The name of a command and its alias, if it has one.
std::string names_of(const Command& command, std::string_view separator) {
  std::string text(command.name);
  if (!command.alias.empty()) text += fmt::format("{}{}", separator, command.alias);
  return text;
}

std::string command_words(const Program& program) {
  std::string text;
  for (const Command& command : program.commands) text += (text.empty() ? "" : " ") + names_of(command, " ");
  return text;
}

// For bash and zsh.
std::string quoted(std::string_view text) {
  std::string result = "'";
  for (const char c : text) {
    result += c == '\'' ? "'\\''" : std::string(1, c);
  }
  return result + "'";
}

// fish knows \' and \\ within single quotes.
std::string fish_quoted(std::string_view text) {
  std::string result = "'";
  for (const char c : text) {
    if (c == '\'' || c == '\\') result += '\\';
    result += c;
  }
  return result + "'";
}

// The branches of a bash `case` on the previous word: options that take a value.
std::string bash_values(const Command& command) {
  std::string free;
  std::string text;
  for (const Option& option : command.options) {
    if (option.positional || is_flag(option) || option.is_path) continue;
    const std::string pattern =
        (option.letter == '\0' ? "" : fmt::format("-{} | ", option.letter)) + fmt::format("--{}", option.name);
    if (option.choices.empty()) {
      free += (free.empty() ? "" : " | ") + pattern;
    } else {
      text += fmt::format("        {}) _tessera_words {} && return ;;\n", pattern, quoted(option.choices));
    }
  }
  if (!free.empty()) text += fmt::format("        {}) compopt +o default; return ;;\n", free);
  return text;
}

std::string zsh_option(const Option& option) {
  std::string others = flags_of(option);
  for (const std::string& other : words_of(option.conflicts)) others += " --" + other;
  const std::string head = option.is_list() ? "'*'" : fmt::format("'({})'", others);
  std::string action;
  if (!is_flag(option)) {
    action = fmt::format(":{}:", option.value_name);
    if (!option.choices.empty()) action += fmt::format("({})", option.choices);
    if (option.is_path) action += "_files";
  }
  std::string text;
  for (const char c : help_of(option)) {
    if (c == '[' || c == ']' || c == ':') text += '\\';
    text += c;
  }
  const std::string names = option.letter == '\0' ? fmt::format("--{}", option.name)
                                                  : fmt::format("{{-{},--{}}}", option.letter, option.name);
  return head + names + quoted("[" + text + "]" + action);
}

std::string zsh_argument(const Option& option, std::size_t number) {
  const std::string_view action = option.takes_rest ? "_normal" : option.is_path ? "_files" : "";
  const std::string position = option.takes_rest ? "*:" : option.is_list() ? "*" : std::to_string(number);
  return quoted(fmt::format("{}:{}:{}", position, option.name, action));
}

std::string fish_option(const std::string& condition, const Option& option) {
  std::string text = fmt::format("complete -c tessera -n {} -l {}", fish_quoted(condition), option.name);
  if (option.letter != '\0') text += fmt::format(" -s {}", option.letter);
  if (option.is_path) {
    text += " -r -F";
  } else if (!is_flag(option)) {
    text += " -x";
  }
  if (!option.choices.empty()) text += " -a " + fish_quoted(option.choices);
  return text + " -d " + fish_quoted(help_of(option)) + "\n";
}

}  // namespace

std::string bash_completion(const Program& program) {
  std::string text =
      "# bash completion for tessera\n\n"
      "_tessera_words() {\n"
      "  mapfile -t COMPREPLY < <(compgen -W \"$1\" -- \"${COMP_WORDS[COMP_CWORD]}\")\n"
      "}\n\n"
      "_tessera() {\n"
      "  local word=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD - 1]} command='' options='' i\n"
      "  COMPREPLY=()\n"
      "  for ((i = 1; i < COMP_CWORD; ++i)); do\n"
      "    [[ ${COMP_WORDS[i]} != -- ]] || return 0\n"
      "    [[ -n $command || ${COMP_WORDS[i]} == -* ]] || command=${COMP_WORDS[i]}\n"
      "  done\n"
      "  case $command in\n";
  text += fmt::format("    '') _tessera_words {}; return ;;\n",
                      quoted(command_words(program) + " " + flags_of(program.options)));
  for (const Command& command : program.commands) {
    text += fmt::format("    {})\n      options={}\n", names_of(command, " | "), quoted(flags_of(command.options)));
    const std::string values = bash_values(command);
    if (!values.empty()) text += "      case $previous in\n" + values + "      esac\n";
    text += "      ;;\n";
  }
  // Without an answer readline completes file names.
  return text +
         "  esac\n"
         "  [[ $word != -* ]] || _tessera_words \"$options\"\n"
         "}\n\n"
         "complete -o default -F _tessera tessera\n";
}

std::string zsh_completion(const Program& program) {
  std::string text =
      "#compdef tessera\n\n"
      "_tessera() {\n"
      "  local context state state_descr line\n"
      "  typeset -A opt_args\n"
      "  _arguments -C \\\n";
  for (const Option& option : program.options) text += "    " + zsh_option(option) + " \\\n";
  text += "    " + zsh_option(help_option()) + " \\\n    '1:command:->command' '*::argument:->argument'\n";
  text += "  case $state in\n    command)\n      local -a commands=(\n";
  for (const Command& command : program.commands) {
    for (const std::string& name : words_of(names_of(command, " "))) {
      text += fmt::format("        {}\n", quoted(fmt::format("{}:{}", name, command.summary)));
    }
  }
  text += "      )\n      _describe command commands\n      ;;\n    argument)\n      case $words[1] in\n";
  for (const Command& command : program.commands) {
    text += fmt::format("        {})\n          _arguments", names_of(command, "|"));
    std::size_t number = 0;
    for (const Option& option : command.options) {
      text += " \\\n            " + (option.positional ? zsh_argument(option, ++number) : zsh_option(option));
    }
    text += " \\\n            " + zsh_option(help_option()) + "\n          ;;\n";
  }
  return text + "      esac\n      ;;\n  esac\n}\n\n_tessera \"$@\"\n";
}

std::string fish_completion(const Program& program) {
  std::string text = "# fish completion for tessera\n\n";
  const std::string none = "__fish_use_subcommand";
  text += fmt::format("complete -c tessera -n {} -f\n", fish_quoted(none));
  for (const Option& option : program.options) text += fish_option(none, option);
  text += fish_option("true", help_option());
  for (const Command& command : program.commands) {
    text += fmt::format("complete -c tessera -n {} -a {} -d {}\n", fish_quoted(none),
                        fish_quoted(names_of(command, " ")), fish_quoted(command.summary));
    const std::string seen = "__fish_seen_subcommand_from " + names_of(command, " ");
    for (const Option& option : command.options) {
      if (!option.positional) text += fish_option(seen, option);
    }
  }
  return text;
}

}  // namespace tessera::cli
