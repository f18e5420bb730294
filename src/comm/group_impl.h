#pragma once
// What a ProcessGroup is, for the files that implement it.

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "comm/backend.h"
#include "comm/liveness.h"
#include "tessera/comm/process_group.h"

namespace tessera {

class ProcessGroup::Impl {
 public:
  // A group of one rank has no backend unless it is given one.
  std::string backend_name = "alone";
  std::string name = "world";
  int rank = 0;
  std::vector<int> world_ranks = {0};
  int world_size = 1;
  std::chrono::milliseconds timeout{0};
  comm::BackendPtr backend;
  comm::StorePtr store;  // of this group
  std::shared_ptr<comm::Liveness> liveness;
  std::uint64_t calls = 0, subgroups = 0;

  Impl() = default;
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;
  ~Impl();

  int size() const { return static_cast<int>(world_ranks.size()); }
  bool is_alone() const { return backend == nullptr; }

  // Starts a collective and waits for it; what goes wrong becomes Error(rank_failure), and the group is broken.
  void run(std::string_view call_name, const std::function<comm::WorkPtr(comm::Backend&)>& start,
           std::chrono::milliseconds limit);
  void run(std::string_view call_name, const std::function<comm::WorkPtr(comm::Backend&)>& start) {
    run(call_name, start, timeout);
  }

  std::string where(std::string_view call) const;

 private:
  void wait(const comm::WorkPtr& work, const comm::Call& call, std::chrono::milliseconds limit);
  [[noreturn]] void fail_as(const comm::Call& call, const std::string& why);

  std::string broken_;
};

}  // namespace tessera
