#pragma once
// Adapts a process group to module checkpoint's RankLink.

#include "tessera/checkpoint/rank_link.h"
#include "tessera/comm/process_group.h"

namespace tessera {

class ProcessGroupLink final : public checkpoint::RankLink {
 public:
  explicit ProcessGroupLink(const ProcessGroup& group, int coordinator = 0)
      : group_(group), coordinator_(coordinator) {}
  int rank() const override { return group_.rank(); }
  int size() const override { return group_.size(); }
  int coordinator() const override { return coordinator_; }
  std::vector<Bytes> gather(ByteView bytes) override { return group_.gather_bytes(bytes, coordinator_); }
  Bytes scatter(const std::vector<Bytes>& parts) override { return group_.scatter_bytes(parts, coordinator_); }
  Bytes broadcast(ByteView bytes) override { return group_.broadcast_bytes(bytes, coordinator_); }
  std::vector<Bytes> all_to_all(const std::vector<Bytes>& parts) override { return group_.all_to_all_bytes(parts); }
  void agree(std::string_view step, const std::exception_ptr& failure) override { group_.agree(step, failure); }

 private:
  ProcessGroup group_;
  int coordinator_;
};

}  // namespace tessera
