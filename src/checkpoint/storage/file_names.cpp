#include "tessera/checkpoint/internal/file_names.h"

#include <fmt/format.h>

#include <charconv>

namespace tessera::checkpoint {
namespace {

// Removes a number in canonical form from the front of `text` and returns it.
std::optional<std::int64_t> take_number(std::string_view& text) {
  std::int64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || number < 0 ||
      fmt::to_string(number).size() != static_cast<std::size_t>(end - text.data())) {
    return std::nullopt;
  }
  text.remove_prefix(static_cast<std::size_t>(end - text.data()));
  return number;
}

bool take(std::string_view& text, std::string_view expected) {
  if (!text.starts_with(expected)) return false;
  text.remove_prefix(expected.size());
  return true;
}

constexpr std::string_view kOfTessera = ".tessera-", kStaging = ".partial", kRemoved = ".removed";

std::string hidden_name(const HiddenName& name, std::string_view suffix) {
  return fmt::format(".{}{}{}-{}{}", name.name, kOfTessera, name.process, name.number, suffix);
}

std::optional<HiddenName> parse_hidden_name(std::string_view text, std::string_view suffix) {
  if (!take(text, ".")) return std::nullopt;
  const std::size_t end = text.rfind(kOfTessera);
  if (end == 0 || end == std::string_view::npos) return std::nullopt;
  std::string_view rest = text.substr(end + kOfTessera.size());
  const auto process = take_number(rest);
  if (!process || !take(rest, "-")) return std::nullopt;
  const auto number = take_number(rest);
  if (!number || rest != suffix) return std::nullopt;
  return HiddenName{std::string(text.substr(0, end)), *process, *number};
}

}  // namespace

std::string to_string(const DataFileName& name) {
  if (name.generation == 0) return fmt::format("__{}_{}.distcp", name.rank, name.number);
  return fmt::format("__{}_{}.{}.distcp", name.rank, name.number, name.generation);
}

std::optional<DataFileName> parse_data_file_name(std::string_view text) {
  DataFileName name;
  if (!take(text, "__")) return std::nullopt;
  const auto rank = take_number(text);
  if (!rank || !take(text, "_")) return std::nullopt;
  const auto number = take_number(text);
  if (!number || !take(text, ".")) return std::nullopt;
  name.rank = *rank;
  name.number = *number;
  if (text != "distcp") {
    const auto generation = take_number(text);
    if (!generation || *generation == 0 || text != ".distcp") return std::nullopt;
    name.generation = *generation;
  }
  return name;
}

std::optional<std::int64_t> parse_rank_metadata_name(std::string_view text) {
  if (!take(text, "__")) return std::nullopt;
  const auto rank = take_number(text);
  return rank && text == kMetadataFileName ? rank : std::nullopt;
}

std::string to_string(const UncommittedName& name) {
  if (name.generation == 0) return name.name + std::string(kTemporarySuffix);
  return fmt::format("{}.{}{}", name.name, name.generation, kTemporarySuffix);
}

std::optional<UncommittedName> parse_uncommitted_name(std::string_view text) {
  if (!text.ends_with(kTemporarySuffix)) return std::nullopt;
  text.remove_suffix(kTemporarySuffix.size());
  UncommittedName result;
  if (const std::size_t dot = text.rfind('.'); dot != std::string_view::npos) {
    std::string_view number = text.substr(dot + 1);
    if (const auto generation = take_number(number); generation && *generation != 0 && number.empty()) {
      result.generation = *generation;
      text = text.substr(0, dot);
    }
  }
  const bool is_shard = text.starts_with("shard-") && text.ends_with(kSafetensorsSuffix);
  if (!is_shard && text != kMetadataFileName) return std::nullopt;
  result.name = text;
  return result;
}

bool may_be_left_by_a_save(std::string_view name) {
  return name == kTemporarySidecarName || parse_data_file_name(name) || parse_uncommitted_name(name);
}

std::string staging_name(const HiddenName& name) { return hidden_name(name, kStaging); }
std::optional<HiddenName> parse_staging_name(std::string_view text) { return parse_hidden_name(text, kStaging); }
std::string removed_name(const HiddenName& name) { return hidden_name(name, kRemoved); }
std::optional<HiddenName> parse_removed_name(std::string_view text) { return parse_hidden_name(text, kRemoved); }

}  // namespace tessera::checkpoint
