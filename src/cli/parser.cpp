// The one file that includes CLI11, whose headers take seconds to compile.

#include "cli/parser.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Error.hpp>
#include <CLI/Formatter.hpp>
#include <CLI/Option.hpp>
#include <algorithm>
#include <charconv>
#include <deque>
#include <optional>
#include <span>
#include <string_view>
#include <type_traits>
#include <utility>

#include "cli/text/help.h"
#include "cli/text/similar_names.h"

namespace tessera::cli {
namespace {

using Strings = std::vector<std::string>;

std::optional<std::int64_t> parse_number(const std::string& text) {
  std::int64_t number = 0;
  const char* end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, number);
  return error == std::errc() && rest == end ? std::optional(number) : std::nullopt;
}

// Returns what the commas of a list separate.
Strings split_list(const std::string& text) {
  Strings parts;
  for (std::size_t begin = 0;;) {
    const std::size_t comma = text.find(',', begin);
    parts.push_back(text.substr(begin, comma - begin));
    if (comma == std::string::npos) return parts;
    begin = comma + 1;
  }
}

// Stores values that check_value accepted.
void store(const Target& target, const Strings& values) {
  std::visit(
      [&](auto* variable) {
        using Type = std::remove_pointer_t<decltype(variable)>;
        if constexpr (std::is_same_v<Type, std::string>) {
          *variable = values.at(0);
        } else if constexpr (std::is_same_v<Type, Strings>) {
          variable->insert(variable->end(), values.begin(), values.end());
        } else if constexpr (std::is_same_v<Type, std::int64_t>) {
          *variable = parse_number(values.at(0)).value();
        } else if constexpr (std::is_same_v<Type, std::vector<std::int64_t>>) {
          variable->clear();
          for (const std::string& part : split_list(values.at(0))) variable->push_back(parse_number(part).value());
        }
      },
      target);
}

// Returns what is wrong with a number; empty if nothing is.
std::string check_number(const Option& option, const std::string& text) {
  const auto number = parse_number(text);
  if (option.range && (!number || *number < option.range->min || *number > option.range->max)) {
    return fmt::format("'{}', expected a number from {} to {}", text, option.range->min, option.range->max);
  }
  return number ? "" : fmt::format("'{}', expected a 64-bit integer", text);
}

// Returns what is wrong with a value; empty if nothing is.
std::string check_value(const Option& option, const std::string& value) {
  if (option.is_path && value.empty()) return "the path is empty";
  if (!option.positional && value.empty()) return "the value is empty, expected one";
  if (option.is_path && option.positional && value == "-") {
    return "'-', expected a path: a checkpoint cannot be read from standard input or written to standard output";
  }
  const Strings choices = words_of(option.choices);
  if (!choices.empty() && std::ranges::find(choices, value) == choices.end()) {
    return fmt::format("'{}', expected one of {}", value, fmt::join(choices, ", "));
  }
  if (std::holds_alternative<std::int64_t*>(option.target)) return check_number(option, value);
  if (!std::holds_alternative<std::vector<std::int64_t>*>(option.target)) return "";
  const Strings numbers = split_list(value);
  if (numbers.size() > option.max_count) {
    return fmt::format("{} numbers, expected at most {}", numbers.size(), option.max_count);
  }
  for (const std::string& number : numbers) {
    if (std::string problem = check_number(option, number); !problem.empty()) return problem;
  }
  return "";
}

void add_option(CLI::App& app, const Option& option) {
  const std::string letter = option.letter == '\0' ? "" : fmt::format("-{},", option.letter);
  const std::string name = fmt::format("{}--{}", letter, option.name);
  if (bool* const* flag = std::get_if<bool*>(&option.target)) {
    app.add_flag(name, **flag);
    return;
  }
  const auto store_values = [&option](const Strings& values) {
    store(option.target, values);
    return true;
  };
  CLI::Option* added = app.add_option(name, store_values, "");
  added->required(option.required)->type_name(std::string(option.value_name));
  if (option.is_list()) added->expected(1, -1)->allow_extra_args(false);
  added->check([&option](const std::string& value) { return check_value(option, value); });
}

// Stores options. `arguments` are nothing else, since CLI11 would interpret other words that are equal to "--" or to
// the name of a command, and brackets in them.
void store_options(const std::vector<Option>& options, Strings arguments) {
  CLI::App app("", "tessera");
  for (const Option& option : options) {
    if (!option.positional) add_option(app, option);
  }
  for (const Option& option : options) {
    for (const std::string& other : words_of(option.conflicts)) {
      app.get_option(fmt::format("--{}", option.name))->excludes(app.get_option("--" + other));
    }
  }
  std::ranges::reverse(arguments);  // as CLI11 takes them
  app.parse(arguments);
}

// Stores what is not an option. A list takes all that remains.
void store_positionals(const std::vector<Option>& options, const Strings& arguments) {
  Strings names;
  auto next = arguments.begin();
  for (const Option& option : options) {
    if (!option.positional) continue;
    names.emplace_back(option.name);
    const auto end = option.is_list() || next == arguments.end() ? arguments.end() : next + 1;
    const Strings values(next, end);
    next = end;
    if (values.empty()) {
      if (option.required) throw UsageError(fmt::format("{} is required", option.name));
      continue;
    }
    const std::string problem = option.is_list() ? "" : check_value(option, values[0]);
    if (!problem.empty()) throw UsageError(fmt::format("{}: {}", option.name, problem));
    store(option.target, values);
  }
  if (next == arguments.end()) return;
  throw UsageError(fmt::format("unexpected argument '{}', expected {}", *next,
                               names.empty() ? "only options" : fmt::format("only {}", fmt::join(names, " "))));
}

constexpr std::string_view kHelp = "help";

bool is_help_option(std::string_view argument) { return argument == "-h" || argument == fmt::format("--{}", kHelp); }

// The option that an argument names: "--name", "--name=value", "-n" or "-nvalue"; null if there is none.
const Option* find_option(const std::vector<Option>& options, std::string_view argument) {
  const bool is_long = argument.starts_with("--");
  const std::string_view name = argument.substr(2, argument.find('=') - 2);
  const auto is_it = [&](const Option& option) {
    return !option.positional &&
           (is_long ? option.name == name : option.letter != '\0' && option.letter == argument[1]);
  };
  const auto found = std::ranges::find_if(options, is_it);
  return found == options.end() ? nullptr : &*found;
}

std::string unknown_option_message(const std::vector<Option>& options, std::string_view argument) {
  if (!argument.starts_with("--")) {
    return fmt::format("unknown option '{}'; expected '--' before arguments that begin with '-'", argument);
  }
  const std::string wanted(argument.substr(0, argument.find('=')));
  Strings known = {fmt::format("--{}", kHelp)};
  for (const Option& option : options) {
    if (!option.positional) known.push_back(fmt::format("--{}", option.name));
  }
  SimilarNames similar(wanted);
  for (const std::string& each : known) similar.add(each);
  return fmt::format("unknown option '{}'{}", wanted, similar.suggestion());
}

// Separates options from other arguments, as getopt_long does: "--" ends the options, and "-qn4" is "-q -n 4".
class SplitArguments {
 public:
  // Throws UsageError for what is not one of `options`.
  SplitArguments(const std::vector<Option>& options, std::deque<std::string> arguments) {
    const bool takes_rest = std::ranges::any_of(options, &Option::takes_rest);
    std::string without_value;
    while (!arguments.empty()) {
      const bool ends_options = arguments.front() == "--";
      const bool is_option = arguments.front().starts_with("-") && arguments.front() != "-";
      if (ends_options || (takes_rest && !is_option)) {
        others_.insert(others_.end(), arguments.begin() + (ends_options ? 1 : 0), arguments.end());
        break;
      }
      const std::string argument = std::move(arguments.front());
      arguments.pop_front();
      if (!is_option) {
        others_.push_back(argument);
      } else if (is_help_option(argument)) {
        options_.push_back(argument);
      } else if (const Option* option = find_option(options, argument); option == nullptr) {
        throw UsageError(unknown_option_message(options, argument));
      } else if (std::holds_alternative<bool*>(option->target)) {
        add_flag(argument, arguments);
      } else if (!add_with_value(*option, argument, arguments) && without_value.empty()) {
        without_value = option->name;
      }
    }
    if (!without_value.empty()) throw UsageError(fmt::format("--{}: found no value, expected one", without_value));
  }

  // Options by their long name, followed by their value; flags as they are.
  const Strings& options() const { return options_; }
  // All others, unexamined.
  const Strings& others() const { return others_; }

 private:
  // Letters after a flag are options of their own.
  void add_flag(const std::string& argument, std::deque<std::string>& next) {
    const bool has_more = !argument.starts_with("--") && argument.size() > 2;
    if (has_more && argument[2] == '-') {
      throw UsageError(fmt::format("unknown option '-' in '{}', expected letters of options", argument));
    }
    options_.push_back(has_more ? argument.substr(0, 2) : argument);
    if (has_more) next.push_front(fmt::format("-{}", argument.substr(2)));
  }

  // Takes the value from `next` if `argument` does not have it; returns whether there is one.
  bool add_with_value(const Option& option, const std::string& argument, std::deque<std::string>& next) {
    std::string value;
    if (argument.starts_with("--") && argument.find('=') != std::string::npos) {
      value = argument.substr(argument.find('=') + 1);
    } else if (!argument.starts_with("--") && argument.size() > 2) {
      value = argument.substr(2);
    } else if (!next.empty() && !next.front().starts_with("--")) {  // but with '-', as numbers may
      value = next.front();
      next.pop_front();
    } else {
      return false;
    }
    options_.insert(options_.end(), {fmt::format("--{}", option.name), value});
    return true;
  }

  Strings options_, others_;
};

// Stores the values of `arguments`.
void store_arguments(const std::vector<Option>& options, std::span<const std::string> arguments) {
  const SplitArguments given(options, {arguments.begin(), arguments.end()});
  store_options(options, given.options());
  store_positionals(options, given.others());
}

// Stores the values of the options before the command, or of all arguments if `command` is null.
void store_program_options(const Program& program, std::span<const std::string> arguments, const Command* command) {
  for (const std::string& argument : arguments) {
    const bool is_of_command = command != nullptr && argument.size() > 1 && argument.starts_with("-") &&
                               !find_option(program.options, argument) && find_option(command->options, argument);
    if (!is_of_command) continue;
    throw UsageError(fmt::format("'{}' stands before the command, expected it after '{}'", argument, command->name));
  }
  store_arguments(program.options, arguments);
}

// The command of that name; null if there is none.
const Command* find_command(const Program& program, std::string_view name) {
  const auto found = std::ranges::find_if(program.commands, [&](const Command& known) {
    return known.name == name || (!known.alias.empty() && known.alias == name);
  });
  return found == program.commands.end() ? nullptr : &*found;
}

// Returns whether the argument after `argument` may be its value: it is an option without one, and not a flag of the
// program or of a command.
bool may_precede_value(const Program& program, std::string_view argument) {
  if (argument.size() < 2 || !argument.starts_with("-") || argument == "--" || is_help_option(argument)) return false;
  const bool has_value = argument.starts_with("--") ? argument.find('=') != argument.npos : argument.size() > 2;
  if (has_value) return false;
  const auto is_flag_of = [&](const std::vector<Option>& options) {
    const Option* option = find_option(options, argument);
    return option != nullptr && std::holds_alternative<bool*>(option->target);
  };
  return !is_flag_of(program.options) && std::ranges::none_of(program.commands, is_flag_of, &Command::options);
}

// The first argument that is neither an option nor the value of one: a command, "help", or what is neither.
Strings::iterator find_command_word(const Program& program, Strings& arguments) {
  const auto is_word = [](const std::string& text) { return !text.starts_with("-"); };
  auto word = std::ranges::find_if(arguments, is_word);
  while (word != arguments.end() && word != arguments.begin() && *word != kHelp && !find_command(program, *word) &&
         may_precede_value(program, *(word - 1))) {
    word = std::find_if(word + 1, arguments.end(), is_word);
  }
  return word;
}

}  // namespace

CommandLine parse(const Program& program, int argc, char** argv) {
  CommandLine line;
  Strings arguments(argv + 1, argv + argc);
  auto word = find_command_word(program, arguments);
  if (word != arguments.end() && *word == kHelp) {
    // "tessera help COMMAND" is "tessera COMMAND --help".
    line.wants_help = true;
    arguments.erase(word);
    word = find_command_word(program, arguments);
  }
  if (word != arguments.end()) {
    line.command = find_command(program, *word);
    if (line.command == nullptr) {
      SimilarNames similar(*word);
      for (const Command& known : program.commands) similar.add(known.name);
      line.error = fmt::format("unknown command '{}', expected one of {}{}", *word, command_names(program),
                               similar.suggestion());
      return line;
    }
    if (line.wants_help) return line;
  }
  if (line.wants_help) return line;
  bool is_of_program = true;  // what is parsed
  try {
    store_program_options(program, {arguments.begin(), word}, line.command);
    is_of_program = false;
    if (line.command != nullptr) store_arguments(line.command->options, {word + 1, arguments.end()});
  } catch (const CLI::CallForHelp&) {
    line.wants_help = true;
  } catch (const CLI::ParseError& error) {
    line.error = error.what();
  } catch (const UsageError& error) {
    line.error = error.what();
  }
  if (is_of_program && !line.error.empty()) line.command = nullptr;
  return line;
}

}  // namespace tessera::cli
