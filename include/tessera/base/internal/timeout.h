#pragma once
// Timeouts that can be converted to any unit and added to any time.

#include <algorithm>
#include <chrono>

namespace tessera {

// Returns `timeout`, or a year if it is longer: milliseconds::max() in other units overflows.
inline std::chrono::milliseconds bounded(std::chrono::milliseconds timeout) {
  constexpr std::chrono::milliseconds kLongest = std::chrono::hours(24 * 365);
  return std::min(timeout, kLongest);
}

}  // namespace tessera
