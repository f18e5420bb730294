#include "tessera/base/internal/process_memory.h"

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <string>

namespace tessera {

namespace {

std::uint64_t without_files(std::uint64_t bytes) { return bytes - std::min(bytes, status_bytes("RssFile")); }

}  // namespace

std::uint64_t status_bytes(std::string_view field) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (!line.starts_with(field) || line.compare(field.size(), 1, ":") != 0) continue;
    return std::strtoull(line.c_str() + field.size() + 1, nullptr, 10) * 1024;
  }
  return 0;
}

std::uint64_t own_memory_bytes() { return without_files(status_bytes("VmRSS")); }
std::uint64_t peak_own_memory_bytes() { return without_files(status_bytes("VmHWM")); }
void forget_peak_memory() { std::ofstream("/proc/self/clear_refs") << "5"; }

}  // namespace tessera
