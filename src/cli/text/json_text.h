#pragma once
// JSON text for output that is written piece by piece. Bytes that are not UTF-8 become U+FFFD.

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

namespace tessera::cli {

// On one line, or with each level indented by `indent` spaces.
std::string json_text(const nlohmann::ordered_json& value, int indent = -1);

// A quoted string.
std::string json_string(std::string_view text);

}  // namespace tessera::cli
