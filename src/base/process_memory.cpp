#include "tessera/base/internal/process_memory.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <fstream>
#include <string>

namespace tessera {

namespace {

std::uint64_t bytes_in(const char* file, std::string_view field) {
  std::ifstream status(file);
  for (std::string line; std::getline(status, line);) {
    if (!line.starts_with(field) || line.compare(field.size(), 1, ":") != 0) continue;
    return std::strtoull(line.c_str() + field.size() + 1, nullptr, 10) * 1024;
  }
  return 0;
}

// Of memory that processes share, each has its part.
std::uint64_t own_part(std::uint64_t bytes, std::uint64_t of_files) {
  const std::uint64_t others = of_files + status_bytes("RssShmem");
  return bytes - std::min(bytes, others) + bytes_in("/proc/self/smaps_rollup", "Pss_Shmem");
}

// The pages of files when the peak was forgotten. The system may reclaim them later.
std::atomic<std::uint64_t> files_at_forget = 0;

}  // namespace

std::uint64_t status_bytes(std::string_view field) { return bytes_in("/proc/self/status", field); }

std::uint64_t own_memory_bytes() { return own_part(status_bytes("VmRSS"), status_bytes("RssFile")); }
std::uint64_t peak_own_memory_bytes() {
  return own_part(status_bytes("VmHWM"), std::max(files_at_forget.load(), status_bytes("RssFile")));
}
void forget_peak_memory() {
  std::ofstream("/proc/self/clear_refs") << "5";
  files_at_forget = status_bytes("RssFile");
}

}  // namespace tessera
