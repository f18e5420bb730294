#pragma once
// FSDP's environment variables.

#include <cstdlib>
#include <string_view>

namespace tessera::fsdp {

// Returns whether the variable is "1".
inline bool is_set(const char* name) {
  const char* const value = std::getenv(name);
  return value != nullptr && std::string_view(value) == "1";
}

}  // namespace tessera::fsdp
