#include "fsdp/warn.h"

#include <c10/util/Exception.h>

#include <cstdlib>
#include <mutex>
#include <set>
#include <string_view>

namespace tessera::fsdp {

void warn_once(const std::string& text) {
  static std::mutex mutex;
  static auto& emitted = *new std::set<std::string>;  // handles may warn after static objects were destroyed
  {
    const std::lock_guard lock(mutex);
    if (!emitted.insert(text).second) return;
  }
  TORCH_WARN("tessera: ", text);
}

bool explains_itself() {
  const char* const level = std::getenv("TORCH_DISTRIBUTED_DEBUG");
  return level != nullptr && (std::string_view(level) == "INFO" || std::string_view(level) == "DETAIL");
}

}  // namespace tessera::fsdp
