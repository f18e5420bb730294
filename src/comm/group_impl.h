#pragma once
// The implementation of ProcessGroup, shared by the source files of this module.

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "comm/backend/backend.h"
#include "comm/device/watchdog.h"
#include "comm/host/engine.h"
#include "comm/rendezvous/liveness.h"
#include "tessera/base/function_ref.h"
#include "tessera/comm/process_group.h"

namespace tessera {

namespace comm {
// What the first message to or from a rank on a device connects: one direction.
struct MessageConnection {
  c10::Device device;
  int peer;
  bool sends;
  bool operator==(const MessageConnection&) const = default;
};
}  // namespace comm

class ProcessGroup::Impl {
 public:
  // The requested backend; a group of one rank needs none.
  std::string backend_name = "alone";
  std::string name = "world";
  int rank = 0;
  std::vector<int> world_ranks = {0};
  int world_size = 1;
  std::chrono::milliseconds timeout{0};
  comm::Transports transports;
  comm::StorePtr store;  // of this group
  std::shared_ptr<comm::Liveness> liveness;
  std::shared_ptr<comm::HostEngines> engines = std::make_shared<comm::HostEngines>();  // of all groups of this rank
  std::unique_ptr<comm::Watchdog> watchdog;  // of a backend on streams; null with another
  std::uint64_t calls = 0, subgroups = 0;
  std::vector<comm::MessageConnection> connected_messages;  // that messages on a device have made

  Impl() = default;
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;
  ~Impl();

  int size() const { return static_cast<int>(world_ranks.size()); }
  bool is_alone() const { return transports.cpu.backend == nullptr; }

  // Makes the transports. Throws Error(rank_failure) naming `operation` if other ranks do not connect.
  void connect(std::string_view operation, const std::optional<comm::Split>& split = {});
  // Returns the transport that carries a collective on `tensor`, after all ranks have connected on its device.
  const comm::Transport& carrier(const at::Tensor& tensor);
  // Returns how all ranks of this group together make a subgroup, if the backend can make one from its connections.
  std::optional<comm::Split> next_split() const;
  // Takes part in a split for a subgroup that this rank is not in.
  void leave_split(const comm::Split& split);

  // Numbers the next call of this group. All ranks must make the same calls. CommDebugMode counts it if it
  // `is_counted`.
  comm::Call next_call(std::string_view call_name, bool is_counted = true);
  // Runs a step of `call`. An exception in it becomes Error(rank_failure), and the group is broken.
  void guard(const comm::Call& call, std::chrono::milliseconds limit, FunctionRef<void()> step) {
    guard(call, limit, step, world_ranks);
  }
  // `others`: the world ranks that may be at fault.
  void guard(const comm::Call& call, std::chrono::milliseconds limit, FunctionRef<void()> step,
             const std::vector<int>& others);
  using Start = FunctionRef<comm::WorkPtr(comm::Backend&)>;
  // Both must run within guard(). If the backend throws when it starts a collective, only this rank refuses it.
  // `device`, here and below: that of the tensors, which need not be the current one.
  comm::WorkPtr start(const comm::Transport& transport, c10::Device device, const comm::Call& call, Start start);
  void wait(const comm::Transport& transport, c10::Device device, const comm::WorkPtr& work, const comm::Call& call,
            std::chrono::milliseconds limit);
  // Starts a collective and waits for it.
  void run(std::string_view call_name, const comm::Transport& transport, c10::Device device, Start start,
           std::chrono::milliseconds limit);
  void run(std::string_view call_name, const comm::Transport& transport, c10::Device device, Start start) {
    run(call_name, transport, device, start, timeout);
  }

  // Starts a collective without waiting. `finish` runs after it has ended.
  static PendingCollective begin(const std::shared_ptr<Impl>& group, std::string_view call_name,
                                 const comm::Transport& transport, c10::Device device, Start start,
                                 std::function<void()> finish = {}, bool is_counted = true);

  // Compares calls, as ProcessGroup::check_call. Returns what each rank passed as `number`. If `describe` throws, its
  // exception reaches all ranks. `compared_as`, if not empty, is compared instead of the operation.
  std::vector<std::int64_t> compare_calls(const std::shared_ptr<Impl>& self, std::string_view operation,
                                          FunctionRef<void(CallArguments&)> describe, std::int64_t number = 0,
                                          std::string_view compared_as = {});

  // A call in which only this rank and `peer` take part. It has no number of its own.
  comm::Call call_with(int peer, std::string_view call_name) const;
  // Waits for messages between this rank and `peer`. Must run within guard().
  void wait_for_peer(const std::vector<comm::WorkPtr>& messages, const comm::Call& call, int peer);
  // Compares the calls of this rank and `peer`, as compare_calls. Returns what `peer` passed as `number`.
  std::int64_t compare_with(int peer, const comm::Call& call, std::string_view compared_as,
                            FunctionRef<void(CallArguments&)> describe, std::int64_t number = 0);

  // Notes that this rank left a step; see internal/step.h.
  void leave_step(std::string_view step, std::string_view reason);

  bool is_broken() const { return !broken_.empty(); }
  std::string where(std::string_view call) const;

 private:
  [[noreturn]] void fail_as(const comm::Call& call, const std::string& why);
  // Runs `step` of the backend, which waits for all ranks, as `call`.
  void connect_devices(const comm::Call& call, std::function<void(comm::Backend& backend)> step);
  // Sends `out` to `peer` and receives `in` from it, over Gloo.
  void swap_with(int peer, const comm::Call& call, const at::Tensor& out, const at::Tensor& in);
  // Returns the collective that `peer` waits in and this rank has not begun, or nothing.
  std::optional<comm::Call> collective_of(int peer) const;
  // Returns the note of a rank that left a step before `call`, if this rank did not; else an empty string.
  std::string left_by_others(const comm::Call& call) const;
  // Blocks until all ranks have left the steps that this rank has left, each after the same call.
  void meet_after_left_step(const comm::Call& call);

  std::string broken_;
  bool is_comparing_ = false;           // in compare_calls
  std::vector<c10::Device> connected_;  // devices on which the ranks have connected
  // How many steps this rank has left, after which call the last one, and how many of them the others have left, too.
  std::uint64_t left_steps_ = 0, left_after_ = 0, met_steps_ = 0;
};

namespace comm {

// How the ranks that compare their calls reach each other: all ranks of a group, or two.
struct CallExchange {
  std::vector<int> ranks;  // in the world
  // Each returns what all of `ranks` passed, in their order. `numbers` has the same size on each.
  std::function<std::vector<std::int64_t>(const std::vector<std::int64_t>& numbers)> gather;
  std::function<std::vector<Bytes>(ByteView bytes, const std::vector<std::int64_t>& sizes)> gather_bytes;
};

// Runs `describe` and compares its arguments and `compared_as`. Returns what each rank passed as `number`. `where`:
// operation and rank, for messages.
std::vector<std::int64_t> compare_calls(const CallExchange& exchange, std::string_view operation,
                                        std::string_view where, std::string_view compared_as,
                                        FunctionRef<void(CallArguments&)> describe, std::int64_t number);

}  // namespace comm

// Collectives on a transport of the group that do not compare the ranks' calls. Arguments must be valid.
namespace comm {
using GroupPtr = std::shared_ptr<ProcessGroup::Impl>;
PendingCollective start_all_gather(const GroupPtr& group, const Transport& transport, std::string_view name,
                                   const at::Tensor& out, const at::Tensor& in, bool is_counted = true);
PendingCollective start_all_to_all(const GroupPtr& group, const Transport& transport, std::string_view name,
                                   const at::Tensor& out, const at::Tensor& in,
                                   std::span<const std::int64_t> out_splits, std::span<const std::int64_t> in_splits);
void broadcast(const GroupPtr& group, const Transport& transport, std::string_view name, const at::Tensor& tensor,
               int root);
std::vector<Bytes> all_gather_bytes(const GroupPtr& group, std::string_view name, ByteView bytes,
                                    const std::vector<std::int64_t>& sizes);
// Adds what a tensor of a collective has in common on all ranks. One on another type of device is carried by another
// backend, in which a rank would wait for the others until the timeout.
CallArguments& add_tensor(CallArguments& arguments, const at::Tensor& tensor);
// Throws Error(invalid_argument), and tells the other ranks, if this dtype cannot be reduced in this way.
void check_reduction(ProcessGroup::Impl& group, std::string_view name, const at::Tensor& tensor, ReduceOp op);
}  // namespace comm

struct PendingCollective::State {
  State() = default;
  State(const State&) = delete;
  State& operator=(const State&) = delete;
  // If no one has waited, makes `stream` wait: work on a stream frees its tensors when it is destroyed.
  ~State();

  std::shared_ptr<ProcessGroup::Impl> group;
  comm::Transport transport;
  c10::Device device = c10::DeviceType::CPU;
  std::optional<c10::Stream> stream;  // of the device, current at the start, to which memory of `finish` belongs
  comm::WorkPtr work;                 // null after wait()
  comm::Call call;
  std::function<void()> finish;
};

}  // namespace tessera
