#pragma once
// How much longer than `make test` the campaigns run: `make chaos` sets TESSERA_CHAOS.

#include <algorithm>
#include <cstdlib>

namespace tessera::testing {

inline int chaos_factor() {
  const char* text = std::getenv("TESSERA_CHAOS");
  return text == nullptr ? 1 : std::max(std::atoi(text), 1);
}

}  // namespace tessera::testing
