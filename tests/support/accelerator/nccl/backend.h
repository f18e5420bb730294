#pragma once
// A backend of c10d that carries tensors of the simulated accelerator between threads, with NCCL's semantics (PyTorch:
// torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp):
//
// - A collective runs on a stream of the backend, which waits for the caller's current stream at the time of the call.
// The call returns
//   at once.
// - Work::wait() and synchronize() make the caller's current stream wait for the collective. The host waits for a
// barrier only.
// - The work keeps inputs and outputs until a stream waits for it, and no longer: their memory does not wait for the
// backend's stream when it is freed (TORCH_NCCL_AVOID_RECORD_STREAMS, the default since PyTorch 2.8).
// - Collectives run in the order of their calls. Messages have streams of their own, one for each direction between two
// ranks.
// - The host waits for the other ranks in the first collective of a kind, and for the other rank in the first message
// of a direction: these connect the ranks, as NCCL does where it needs a further connection.
// - Tensors are contiguous and on one device. Sums are computed in the dtype of the tensors, by rank order (group.h).

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <tuple>
#include <vector>

#include "support/accelerator/nccl/group.h"

namespace tessera::sim {

class NcclBackend final : public ::c10d::Backend {
 public:
  using WorkPtr = c10::intrusive_ptr<::c10d::Work>;
  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<std::vector<at::Tensor>>;

  // All ranks of a group pass the same name, which no group of the process had.
  NcclBackend(const std::string& group_name, int rank, int size);
  // Rank 0 gives the others the name through the store, which is the group's own.
  NcclBackend(const c10::intrusive_ptr<::c10d::Store>& store, int rank, int size);

  const std::string getBackendName() const override { return "nccl"; }  // NOLINT(readability-const-return-type): c10d's
  void setSequenceNumberForGroup() override {}
  std::uint64_t getSequenceNumberForGroup() override { return calls_; }
  // Ends the work that waits for other ranks, as NCCL's does.
  ~NcclBackend() override { abort_work(); }
  // Blocks until all ranks have connected, as the first collective on a device does.
  void connect() {
    group_->meet(getRank());
    is_connected_ = true;
  }
  // Returns the backend of a subgroup that all ranks of this group make together, as ncclCommSplit does. A rank that is
  // not in it passes no options, and gets none.
  struct SplitOptions {
    int color = 0, rank = 0, size = 1;
  };
  c10::intrusive_ptr<NcclBackend> make_subgroup(const std::optional<SplitOptions>& options);
  // As ncclCommAbort.
  void abort_work() { group_->abort(getRank()); }
  void startCoalescing() override;
  WorkPtr endCoalescing() override;

  WorkPtr broadcast(Tensors& tensors, const ::c10d::BroadcastOptions& options = {}) override;
  WorkPtr allreduce(Tensors& tensors, const ::c10d::AllreduceOptions& options = {}) override;
  WorkPtr allreduce_coalesced(Tensors& tensors, const ::c10d::AllreduceCoalescedOptions& options = {}) override;
  WorkPtr reduce(Tensors& tensors, const ::c10d::ReduceOptions& options = {}) override;
  WorkPtr allgather(TensorLists& outputs, Tensors& inputs, const ::c10d::AllgatherOptions& options = {}) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const ::c10d::AllgatherOptions& options = {}) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const ::c10d::AllgatherOptions& options = {}) override;
  WorkPtr gather(TensorLists& outputs, Tensors& inputs, const ::c10d::GatherOptions& options = {}) override;
  WorkPtr scatter(Tensors& outputs, TensorLists& inputs, const ::c10d::ScatterOptions& options = {}) override;
  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs,
                         const ::c10d::ReduceScatterOptions& options = {}) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const ::c10d::ReduceScatterOptions& options = {}) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const ::c10d::ReduceScatterOptions& options = {}) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<std::int64_t>& output_splits,
                        std::vector<std::int64_t>& input_splits, const ::c10d::AllToAllOptions& options = {}) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const ::c10d::AllToAllOptions& options = {}) override;
  WorkPtr send(Tensors& tensors, int destination, int tag) override;
  WorkPtr recv(Tensors& tensors, int source, int tag) override;
  WorkPtr barrier(const ::c10d::BarrierOptions& options = {}) override;

 private:
  struct Contribution {
    Part part;
    Tensors inputs = {}, outputs = {};  // as `part` has them
  };
  // Blocks until all ranks have connected for this kind of collective.
  void connect_for(Collective collective) {
    if (collectives_.insert(collective).second) group_->meet(getRank());
  }
  // Starts a collective. `results` are what its work returns.
  WorkPtr start(Contribution contribution, Tensors results);
  WorkPtr start_message(Contribution contribution, int source, int destination, const at::Tensor& tensor);
  // Makes `stream` wait for the current stream. The next work keeps the tensors.
  void order_streams(StreamKey stream, Contribution& contribution);
  WorkPtr work_of(Collective collective, StreamKey stream, Tensors results);
  StreamKey collective_stream(int device);

  std::string name_;
  std::shared_ptr<Group> group_;
  bool is_connected_ = false;
  std::set<Collective> collectives_;  // for which the ranks have connected
  std::uint64_t calls_ = 0;
  Tensors kept_;                                              // by the next work
  std::map<int, StreamKey> streams_;                          // of collectives, by device
  std::map<std::pair<int, int>, StreamKey> message_streams_;  // by source and destination
  std::map<std::pair<int, int>, std::uint64_t> messages_;     // their numbers
  std::optional<std::vector<WorkPtr>> coalesced_;
};

}  // namespace tessera::sim
