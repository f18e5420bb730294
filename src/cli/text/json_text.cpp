#include "cli/text/json_text.h"

#include <fmt/format.h>

#include <cstdint>
#include <nlohmann/json.hpp>

#include "tessera/base/internal/utf8.h"

namespace tessera::cli {
namespace {

// Of a UTF-8 sequence of 1 to 3 bytes.
std::uint32_t code_point(std::string_view sequence) {
  const auto at = [&](std::size_t i) { return static_cast<std::uint32_t>(static_cast<unsigned char>(sequence[i])); };
  if (sequence.size() == 1) return at(0);
  if (sequence.size() == 2) return (at(0) & 0x1f) << 6 | (at(1) & 0x3f);
  return (at(0) & 0x0f) << 12 | (at(1) & 0x3f) << 6 | (at(2) & 0x3f);
}

}  // namespace

std::string json_text(const nlohmann::ordered_json& value, int indent) {
  const std::string text = value.dump(indent, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
  // JSON escapes C0 controls only. Line breaks are those of the indentation; all other controls are in strings.
  std::string out;
  out.reserve(text.size());
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t control = text[at] == '\n' ? 0 : control_sequence_length(std::string_view(text).substr(at));
    if (control == 0) {
      out += text[at++];
    } else {
      out += fmt::format("\\u{:04x}", code_point(std::string_view(text).substr(at, control)));
      at += control;
    }
  }
  return out;
}

std::string json_string(std::string_view text) { return json_text(nlohmann::ordered_json(std::string(text))); }

}  // namespace tessera::cli
