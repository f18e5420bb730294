#pragma once
// Pieces of JSON text for output that is written as it is made. Bytes that are not UTF-8 become U+FFFD.

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace tessera::cli {

inline std::string json_text(const nlohmann::ordered_json& value, int indent = -1) {
  return value.dump(indent, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

inline std::string json_string(std::string_view text) { return json_text(nlohmann::ordered_json(std::string(text))); }

}  // namespace tessera::cli
