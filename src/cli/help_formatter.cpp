#include "cli/help_formatter.h"

#include <CLI/App.hpp>
#include <CLI/Option.hpp>
#include <utility>

namespace tessera::cli {
namespace {

// Without the ends of lines around it, of which every version of CLI11 writes others.
std::string trimmed(const std::string& text) {
  const std::size_t begin = text.find_first_not_of('\n');
  return begin == std::string::npos ? "" : text.substr(begin, text.find_last_not_of('\n') + 1 - begin);
}

}  // namespace

HelpFormatter::HelpFormatter() { column_width(26); }

std::string HelpFormatter::make_option_opts(const CLI::Option* option) const {
  if (option->get_positional()) return option->get_expected_max() > 1 ? " ..." : "";
  if (option->get_type_size() == 0) return "";
  const std::string type = option->get_type_name();  // with what its validators say of themselves after a colon
  return " " + type.substr(0, type.find(':'));
}

std::string HelpFormatter::make_usage(const CLI::App* app, std::string name) const {
  const std::string usage = trimmed(CLI::Formatter::make_usage(app, std::move(name)));
  return (usage.starts_with("Usage:") ? "" : "Usage: ") + usage + "\n";
}

std::string HelpFormatter::make_help(const CLI::App* app, std::string name, CLI::AppFormatMode mode) const {
  return trimmed(make_description(app)) + "\n" + make_usage(app, std::move(name)) + make_positionals(app) +
         make_groups(app, mode) + make_subcommands(app, mode) + "\n" + trimmed(make_footer(app)) + "\n";
}

}  // namespace tessera::cli
