#pragma once
// The names in a state dict.

#include <string>
#include <variant>
#include <vector>

#include "tessera/state/value.h"

namespace tessera::testing {

// Returns the keys, in order. All must be strings.
inline std::vector<std::string> names_of(const StateDict& state) {
  std::vector<std::string> names;
  names.reserve(state.size());
  for (const auto& [key, value] : state) names.push_back(std::get<std::string>(key));
  return names;
}

}  // namespace tessera::testing
