#pragma once
// Memory of this process, as the system counts it (/proc/self). The functions return 0 where the system does not count.

#include <cstdint>
#include <string_view>

namespace tessera {

// Returns a field of /proc/self/status in bytes, such as "VmRSS", "VmHWM" (the peak of VmRSS) or "VmData".
std::uint64_t status_bytes(std::string_view field);

// Resident memory without pages of files: these belong to libraries, and their number depends on what the process
// happened to touch. Of memory that processes share, each has its part, as of now. The second is the peak since
// forget_peak_memory(); a little less than that if the system reclaimed pages of files before it, and reads them again.
std::uint64_t own_memory_bytes();
std::uint64_t peak_own_memory_bytes();
void forget_peak_memory();

}  // namespace tessera
