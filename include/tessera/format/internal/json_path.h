#pragma once
// Paths of state dicts in JSON: lists of strings and integers.

#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "tessera/base/state_path.h"

namespace tessera::json {

// What a part of a path has to be, for messages.
inline constexpr const char* kPathParts = "strings and integers from -2^63 to 2^63 - 1";

// Returns a part of a path, or nothing for another value.
template <typename Json>
std::optional<Key> path_part(const Json& part) {
  if (part.is_string()) return Key(part.template get<std::string>());
  const bool is_above = part.is_number_unsigned() &&
                        part.template get<std::uint64_t>() > std::uint64_t{std::numeric_limits<std::int64_t>::max()};
  if (!part.is_number_integer() || is_above) return std::nullopt;
  return Key(part.template get<std::int64_t>());
}

}  // namespace tessera::json
