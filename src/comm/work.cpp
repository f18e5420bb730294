#include "comm/work.h"

namespace tessera::comm {

bool wait_for(::c10d::Work& work, std::chrono::milliseconds limit) {
  try {
    work.wait(limit);
  } catch (...) {
    if (!work.isCompleted()) return false;
    // It failed, or ended just after the limit. The exception does not tell which; this wait does.
    work.wait();
  }
  return true;
}

}  // namespace tessera::comm
