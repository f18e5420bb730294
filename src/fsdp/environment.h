#pragma once
// Switches that FSDP has in the environment.

#include <cstdlib>
#include <string_view>

namespace tessera::fsdp {

inline bool is_set(const char* name) {
  const char* const value = std::getenv(name);
  return value != nullptr && std::string_view(value) == "1";
}

}  // namespace tessera::fsdp
