#include "comm/work.h"

namespace tessera::comm {

bool wait_for(::c10d::Work& work, std::chrono::milliseconds limit) {
  try {
    work.wait(limit);
  } catch (...) {
    if (!work.isCompleted()) return false;
    // It failed, or ended well just after the limit: that it ended in time can't be told from what was thrown.
    work.wait();
  }
  return true;
}

}  // namespace tessera::comm
