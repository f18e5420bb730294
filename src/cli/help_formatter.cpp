#include "cli/help_formatter.h"

#include <CLI/Option.hpp>

namespace tessera::cli {

HelpFormatter::HelpFormatter() { column_width(26); }

std::string HelpFormatter::make_option_opts(const CLI::Option* option) const {
  if (option->get_positional()) return option->get_expected_max() > 1 ? " ..." : "";
  if (option->get_type_size() == 0) return "";
  const std::string type = option->get_type_name();  // with what its validators say of themselves after a colon
  return " " + type.substr(0, type.find(':'));
}

}  // namespace tessera::cli
