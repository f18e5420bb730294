#include "cli/command.h"

#include <fmt/format.h>

#include <array>
#include <cctype>
#include <charconv>
#include <cmath>
#include <string_view>
#include <utility>

namespace tessera::cli {

std::shared_ptr<const checkpoint::Checkpoint> Session::open(const std::string& path) {
  auto opened = checkpoint::Checkpoint::open(path);
  for (const std::string& warning : opened->warnings()) print_warning(warning);
  return opened;
}

void add_json_flag(CLI::App& app, bool& json) {
  app.add_flag("--json", json, "Print JSON, and nothing else, on standard output");
}

void add_jobs_flag(CLI::App& app, std::size_t& jobs) {
  app.add_option("--jobs", jobs, "Threads that read and write (default: one for each processor)")
      ->check(CLI::Range(1, 1024))
      ->type_name("N");
}

void add_selection_flags(CLI::App& app, checkpoint::Selection& selection) {
  // One value a flag, so that a glob is never taken for the next argument, nor "[ab]" for a list.
  app.add_option("--select", selection.select, "Only names that match this glob; may be given several times")
      ->allow_extra_args(false)
      ->type_name("GLOB");
  app.add_option("--exclude", selection.exclude, "Not the names that match this glob; may be given several times")
      ->allow_extra_args(false)
      ->type_name("GLOB");
}

void check_selection(const checkpoint::Selection& selection,
                     const std::vector<const checkpoint::Checkpoint*>& checkpoints) {
  if (selection.select.empty() && selection.exclude.empty()) return;
  std::vector<bool> matched(selection.select.size(), false);
  bool any_name = false, any_selected = false;
  const auto visit = [&](std::string_view name) {
    any_name = true;
    any_selected = any_selected || selection.takes(name);
    for (std::size_t i = 0; i < matched.size(); ++i) {
      if (!matched[i]) matched[i] = checkpoint::glob_matches(selection.select[i], name);
    }
  };
  for (const checkpoint::Checkpoint* checkpoint : checkpoints) {
    for (const auto& tensor : checkpoint->tensors()) visit(tensor.name);
    for (const auto& object : checkpoint->objects()) visit(object.name);
  }
  for (std::size_t i = 0; i < matched.size(); ++i) {
    if (!matched[i]) throw UsageError(fmt::format("--select: no name matches '{}'", selection.select[i]));
  }
  if (any_name && !any_selected) throw UsageError("--select and --exclude leave nothing");
}

std::uint64_t parse_size(const std::string& text) {
  static constexpr std::array<std::pair<std::string_view, double>, 14> kUnits = {{{"", 1},
                                                                                  {"B", 1},
                                                                                  {"K", 1e3},
                                                                                  {"KB", 1e3},
                                                                                  {"M", 1e6},
                                                                                  {"MB", 1e6},
                                                                                  {"G", 1e9},
                                                                                  {"GB", 1e9},
                                                                                  {"T", 1e12},
                                                                                  {"TB", 1e12},
                                                                                  {"KIB", 1024.0},
                                                                                  {"MIB", 1048576.0},
                                                                                  {"GIB", 1073741824.0},
                                                                                  {"TIB", 1099511627776.0}}};
  double number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number, std::chars_format::fixed);
  std::string unit;
  for (const char* c = end; c != text.data() + text.size(); ++c) {
    if (*c != ' ' || !unit.empty()) unit += static_cast<char>(std::toupper(static_cast<unsigned char>(*c)));
  }
  if (error == std::errc() && std::isfinite(number)) {
    for (const auto& [name, factor] : kUnits) {
      if (name != unit) continue;
      const double bytes = number * factor;
      if (bytes >= 1 && bytes < 9.2e18) return static_cast<std::uint64_t>(bytes);
      throw UsageError(fmt::format("'{}' is no size that a file can have", text));
    }
  }
  throw UsageError(fmt::format("'{}' is no size; write 5GB, 500MB, 2GiB or a number of bytes", text));
}

}  // namespace tessera::cli
