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
#include <optional>
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
          for (const std::string& value : values) variable->push_back(parse_number(value).value());
        }
      },
      target);
}

// Returns what is wrong with a value; empty if nothing is.
std::string check_value(const Option& option, const std::string& value) {
  if (option.is_path && value.empty()) return "the path is empty";
  if (option.is_path && option.positional && value == "-") {
    return "'-', expected a path: a checkpoint cannot be read from standard input or written to standard output";
  }
  const Strings choices = words_of(option.choices);
  if (!choices.empty() && std::ranges::find(choices, value) == choices.end()) {
    return fmt::format("'{}', expected one of {}", value, fmt::join(choices, ", "));
  }
  const bool is_number = std::holds_alternative<std::int64_t*>(option.target) || option.max_count > 0;
  if (!is_number) return "";
  const auto number = parse_number(value);
  if (option.range && (!number || *number < option.range->min || *number > option.range->max)) {
    return fmt::format("'{}', expected a number from {} to {}", value, option.range->min, option.range->max);
  }
  if (!number) return fmt::format("'{}', expected a 64-bit integer", value);
  return "";
}

// One command, as CLI11 knows it.
class ParsedCommand {
 public:
  // `rest` is what follows "--" if the command takes it.
  ParsedCommand(CLI::App& app, const std::vector<Option>& options, const Strings& rest) : app_(app) {
    for (const Option& option : options) add(option, rest);
    for (const Option& option : options) {
      for (const std::string& other : words_of(option.conflicts)) {
        app.get_option(fmt::format("--{}", option.name))->excludes(app.get_option("--" + other));
      }
    }
  }

  // Collects the values of a positional list.
  void finish(const Strings& rest) const {
    if (list_ == nullptr) return;
    Strings values = list_option_->results();
    for (const std::string& value : app_.remaining()) values.push_back(value);
    if (list_->takes_rest) values.insert(values.end(), rest.begin(), rest.end());
    store(list_->target, values);
  }

 private:
  void add(const Option& option, const Strings& rest) {
    const std::string letter = option.letter == '\0' ? "" : fmt::format("-{},", option.letter);
    const std::string name = fmt::format("{}{}{}", letter, option.positional ? "" : "--", option.name);
    if (bool* const* flag = std::get_if<bool*>(&option.target)) {
      app_.add_flag(name, **flag);
      return;
    }
    if (option.positional && option.is_list()) {
      // Without extra arguments CLI11 does not take apart a value in brackets, which may be a glob. It then stores one
      // value or all, depending on its version, and the others remain.
      list_ = &option;
      list_option_ = app_.add_option(
          name, [](const Strings&) { return true; }, "");
      list_option_->expected(1, -1)->allow_extra_args(false);
      list_option_->required(option.required && (!option.takes_rest || rest.empty()));
      app_.allow_extras();
      return;
    }
    const auto store_values = [&option](const Strings& values) {
      store(option.target, values);
      return true;
    };
    CLI::Option* added = app_.add_option(name, store_values, "");
    added->required(option.required)->type_name(std::string(option.value_name));
    if (option.is_list()) added->expected(1, -1)->allow_extra_args(false);
    if (option.max_count > 0) {
      added->delimiter(',')->expected(1, static_cast<int>(option.max_count))->allow_extra_args(true);
    }
    added->check([&option](const std::string& value) { return check_value(option, value); });
  }

  CLI::App& app_;
  const Option* list_ = nullptr;
  CLI::Option* list_option_ = nullptr;
};

constexpr std::string_view kHelp = "help";

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

// Returns a message for the first option between `begin` and `end`, or "--", that is not one of `options`.
std::string unknown_option(const std::vector<Option>& options, Strings::const_iterator begin,
                           Strings::const_iterator end) {
  for (auto at = begin; at != end && *at != "--"; ++at) {
    if (!at->starts_with("-") || *at == "-" || *at == "-h" || *at == fmt::format("--{}", kHelp)) continue;
    const Option* const option = find_option(options, *at);
    if (option == nullptr) return unknown_option_message(options, *at);
    const bool has_value = at->starts_with("--") ? at->find('=') != std::string::npos : at->size() > 2;
    // A value may begin with '-', as numbers do.
    if (!std::holds_alternative<bool*>(option->target) && !has_value && at + 1 != end && !(at + 1)->starts_with("--")) {
      ++at;
    }
  }
  return "";
}

}  // namespace

CommandLine parse(const Program& program, int argc, char** argv) {
  CommandLine line;
  Strings arguments(argv + 1, argv + argc), rest;
  CLI::App app("", "tessera");
  const ParsedCommand top(app, program.options, {});
  std::optional<ParsedCommand> command;
  // The first argument that is not a flag must be a command. CLI11's message for another word does not list them.
  const auto is_word = [](const std::string& text) { return !text.starts_with("-"); };
  auto word = std::ranges::find_if(arguments, is_word);
  if (word != arguments.end() && *word == kHelp) {
    // "tessera help COMMAND" is "tessera COMMAND --help".
    line.wants_help = true;
    arguments.erase(word);
    word = std::ranges::find_if(arguments, is_word);
  }
  if (word != arguments.end()) {
    const auto found = std::ranges::find_if(program.commands, [&](const Command& known) {
      return known.name == *word || (!known.alias.empty() && known.alias == *word);
    });
    if (found == program.commands.end()) {
      SimilarNames similar(*word);
      for (const Command& known : program.commands) similar.add(known.name);
      line.error = fmt::format("unknown command '{}', expected one of {}{}", *word, command_names(program),
                               similar.suggestion());
      return line;
    }
    line.command = &*found;
    if (line.wants_help) return line;
    *word = found->name;
    if (std::ranges::any_of(found->options, &Option::takes_rest)) {
      const auto dashes = std::find(word, arguments.end(), "--");
      if (dashes != arguments.end()) rest.assign(dashes + 1, arguments.end());
      arguments.erase(dashes, arguments.end());
    }
    if (std::string error = unknown_option(found->options, word, arguments.end()); !error.empty()) {
      line.error = std::move(error);
      return line;
    }
    command.emplace(*app.add_subcommand(std::string(found->name)), found->options, rest);
  }
  if (line.wants_help) return line;
  try {
    std::ranges::reverse(arguments);  // as CLI11 takes them
    app.parse(arguments);
    if (command) command->finish(rest);
  } catch (const CLI::CallForHelp&) {
    line.wants_help = true;
  } catch (const CLI::ParseError& error) {
    line.error = error.what();
  } catch (const UsageError& error) {
    line.error = error.what();
  }
  return line;
}

}  // namespace tessera::cli
