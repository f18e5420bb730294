#include "comm/host/place.h"

#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <string_view>

namespace tessera::comm {

std::string host_place(const char* kind, const char* off_if_0) {
  const char* wanted = std::getenv(off_if_0);
  if (wanted != nullptr && std::string_view(wanted) == "0") return {};
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  char space[64];
  const ssize_t length = ::readlink((std::string("/proc/self/ns/") + kind).c_str(), space, sizeof(space));
  if (boot.empty() || length <= 0) return {};
  return boot + "/" + std::string(space, static_cast<std::size_t>(length));
}

}  // namespace tessera::comm
