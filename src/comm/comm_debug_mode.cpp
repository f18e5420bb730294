#include "tessera/comm/comm_debug_mode.h"

#include "comm/group_impl.h"

namespace tessera {

struct CommDebugMode::Start {
  std::shared_ptr<comm::Liveness> liveness;  // null for a world of one rank
  comm::CallCounts before;
};

CommDebugMode::CommDebugMode(const ProcessGroup& group) {
  const std::shared_ptr<comm::Liveness>& liveness = group.impl_->liveness;
  start_ = std::make_shared<const Start>(Start{liveness, liveness ? liveness->counts() : comm::CallCounts()});
}

std::map<std::string, std::int64_t> CommDebugMode::counts() const {
  if (!start_->liveness) return {};
  std::map<std::string, std::int64_t> counts = start_->liveness->counts().collectives;
  for (const auto& [name, before] : start_->before.collectives) {
    if ((counts[name] -= before) == 0) counts.erase(name);
  }
  return counts;
}

std::int64_t CommDebugMode::total() const {
  std::int64_t total = 0;
  for (const auto& [name, count] : counts()) total += count;
  return total;
}

std::int64_t CommDebugMode::comparisons() const {
  return start_->liveness ? start_->liveness->counts().comparisons - start_->before.comparisons : 0;
}

}  // namespace tessera
