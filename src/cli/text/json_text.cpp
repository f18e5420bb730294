#include "cli/text/json_text.h"

#include <nlohmann/json.hpp>

namespace tessera::cli {

std::string json_text(const nlohmann::ordered_json& value, int indent) {
  return value.dump(indent, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

std::string json_string(std::string_view text) { return json_text(nlohmann::ordered_json(std::string(text))); }

}  // namespace tessera::cli
