#pragma once
// Sizes as people write them.

#include <cstdint>
#include <string>

namespace tessera::cli {

// Returns the bytes of "5GB", "1.5 GiB", "500MB" or "1048576": units of 1000, units of 1024 with an "i", bytes without
// a unit. Throws UsageError, beginning with `operation`, for anything else, for 0 and for more than 63 bits.
std::uint64_t parse_size(const std::string& operation, const std::string& text);

}  // namespace tessera::cli
