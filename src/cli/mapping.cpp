#include "cli/mapping.h"

#include <fmt/format.h>

#include <cerrno>
#include <charconv>
#include <cstring>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>

#include "cli/output.h"
#include "cli/text/json_text.h"
#include "tessera/base/bytes.h"
#include "tessera/base/error.h"
#include "tessera/base/file.h"
#include "tessera/checkpoint/report_json.h"

namespace tessera::cli {
namespace {

using checkpoint::TensorMap;

TensorMap::Parameters parameters_of(const std::vector<std::string>& set) {
  TensorMap::Parameters parameters;
  for (const std::string& one : set) {
    const std::size_t equals = one.find('=');
    std::int64_t value = 0;
    const char* const begin = one.data() + std::min(equals, one.size() - 1) + 1;
    const char* const end = one.data() + one.size();
    const auto [parsed, error] = std::from_chars(begin, end, value);
    if (equals == std::string::npos || equals == 0 || error != std::errc() || parsed != end) {
      throw UsageError(fmt::format("--set: found '{}', expected NAME=NUMBER, a 64-bit integer", printable(one)));
    }
    const std::string name = one.substr(0, equals);
    if (!parameters.emplace(name, value).second) {
      throw UsageError(fmt::format("--set: found '{}' twice, expected each parameter once", printable(name)));
    }
  }
  return parameters;
}

// Returns what standard input, a pipe or another stream has up to its end, or a byte more than a map may have.
std::string read_stream(std::istream& in, const std::string& name) {
  std::string text(TensorMap::kMaxBytes + 1, '\0');
  in.read(text.data(), static_cast<std::streamsize>(text.size()));
  if (!in && !in.eof()) fail(ErrorCode::io, "read {}: {}", name, std::strerror(errno));
  text.resize(static_cast<std::size_t>(in.gcount()));
  return text;
}

// A map may come from a pipe: "-", or what a shell makes of <(...).
TensorMap read_map(const std::string& file_or_name, const TensorMap::Parameters& parameters, std::string_view config) {
  if (file_or_name == "-") {
    return TensorMap::parse(read_stream(std::cin, "standard input"), "standard input", parameters, config);
  }
  std::error_code error;
  const std::filesystem::file_status status = std::filesystem::status(file_or_name, error);
  if (!std::filesystem::is_fifo(status) && !std::filesystem::is_character_file(status)) {
    return TensorMap::read(file_or_name, parameters, config);
  }
  std::ifstream in(file_or_name, std::ios::binary);
  return TensorMap::parse(read_stream(in, file_or_name), file_or_name, parameters, config);
}

}  // namespace

void add_map_options(MapFlags& flags, std::vector<Option>& options) {
  options.push_back(
      {.name = "map",
       .value_name = "MAP",
       .help = "Change names and shapes by this map: a JSON file, - for standard input, or the name of one of "
               "tessera's maps; can be given several times",
       .target = &flags.maps,
       .is_path = true});
  options.push_back({.name = "rename",
                     .value_name = "s/A/B/",
                     .help =
                         "Replace what matches the regular expression A in names by B, after the maps; with the flag "
                         "g everywhere in a name; can be given several times",
                     .target = &flags.renames});
  options.push_back({.name = "set",
                     .value_name = "NAME=N",
                     .help = "Set a parameter of the maps, such as heads=32; can be given several times",
                     .target = &flags.set});
  options.push_back({.name = "invert", .help = "Apply the inverse of the maps", .target = &flags.invert});
  options.push_back({.name = "check",
                     .help = "Print what prevents the map from being applied, and write nothing; exit status 1 if "
                             "anything does",
                     .target = &flags.check});
}

std::optional<TensorMap> map_of(const MapFlags& flags, const std::filesystem::path& config) {
  if (!flags.any()) {
    if (!flags.set.empty() || flags.invert || flags.check) {
      throw UsageError(fmt::format("--{} needs --map", !flags.set.empty() ? "set" : flags.invert ? "invert" : "check"));
    }
    return std::nullopt;
  }
  if (flags.maps.empty() && (flags.invert || !flags.set.empty())) {
    throw UsageError(fmt::format("--{} needs --map", flags.invert ? "invert" : "set"));
  }
  const TensorMap::Parameters parameters = parameters_of(flags.set);
  Bytes config_text;
  if (!flags.maps.empty() && !config.empty()) {
    config_text = read_file(config, TensorMap::kMaxBytes);
    // TensorMap takes a text without characters for none, and then the defaults.
    if (config_text.empty()) {
      fail(ErrorCode::invalid_argument, "{}: found 0 bytes, expected a JSON object", printable(config.string()));
    }
  }
  TensorMap map;
  for (const std::string& one : flags.maps) map = map.then(read_map(one, parameters, as_text(config_text)));
  if (flags.invert) map = map.inverse();
  for (const std::string& one : flags.renames) {
    try {
      map = map.then(TensorMap::substitution(one));
    } catch (const Error& error) {
      if (error.code() != ErrorCode::invalid_argument) throw;
      throw UsageError(fmt::format("--rename: {}", error.what()));
    }
  }
  return map;
}

bool print_check(Session& session, const TensorMap& map, const std::shared_ptr<const checkpoint::Checkpoint>& source,
                 bool json) {
  const std::vector<std::string> problems = map.check(source);
  if (json) {
    session.out.print("{}\n", json_text(nlohmann::ordered_json{{"schema", checkpoint::json_schema("convert-check")},
                                                               {"problems", problems}},
                                        2));
    return problems.empty();
  }
  for (const std::string& problem : problems) session.out.print("{}\n", one_line(problem));
  if (problems.empty()) {
    const auto view = map.apply(source);
    session.out.print("the map fits: {} and {} become {} and {}\n", counted(source->tensors().size(), "tensor"),
                      counted(source->objects().size(), "object"), counted(view->tensors().size(), "tensor"),
                      counted(view->objects().size(), "object"));
  } else {
    session.out.print("{}\n", counted(problems.size(), "problem"));
  }
  return problems.empty();
}

}  // namespace tessera::cli
