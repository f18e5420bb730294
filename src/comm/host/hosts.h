#pragma once
// A backend of c10d for ranks on several hosts, of which each has as many. It has two levels: within a host, ranks
// communicate through the memory that they share; between hosts through c10d, where each rank has a rail, which is a
// group of the ranks with its place on each host. All ranks of a host use the link at the same time, each for its part
// of the bytes:
//
//   all-reduce       reduce-scatter within the hosts, all-reduce on the rails, all-gather within the hosts
//   reduce-scatter   the same within the hosts, then on the rails
//   all-gather       on the rails, then within the hosts
//   broadcast        within the root's host, a part on each rail, all-gather within the other hosts
//   all-to-all       within the hosts and, at the same time, between ranks of different hosts
//   barrier          within the hosts, then on the rails
//
// So no byte that a host needs reaches it twice. Sums are those of the ranks of a host, in the order of the group, and
// then those of the hosts, in the order of their first ranks; all ranks have the same bits.

#include <memory>
#include <vector>

#include "comm/c10d.h"
#include "comm/host/engine.h"

namespace tessera::comm {

class HostsBackend final : public Backend {
 public:
  // The ranks of each host, in their order. All hosts have as many.
  using RanksOfHosts = std::vector<std::vector<int>>;

  // `rail`: the ranks with this rank's place, one of each host, in the order of `ranks_of_hosts`. `all`: all ranks.
  HostsBackend(int rank, RanksOfHosts ranks_of_hosts, std::unique_ptr<Host> host, BackendPtr rail, BackendPtr all,
               const std::shared_ptr<HostEngines>& engines);

  const std::string getBackendName() const override {
    return "hosts";
  }  // NOLINT(readability-const-return-type): c10d's
  WorkPtr broadcast(std::vector<at::Tensor>& tensors, const ::c10d::BroadcastOptions& options) override;
  WorkPtr allreduce(std::vector<at::Tensor>& tensors, const ::c10d::AllreduceOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const ::c10d::AllgatherOptions& options) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const ::c10d::ReduceScatterOptions& options) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<std::int64_t>& output_splits,
                        std::vector<std::int64_t>& input_splits, const ::c10d::AllToAllOptions& options) override;
  WorkPtr barrier(const ::c10d::BarrierOptions& options) override;

 private:
  // Start an op of a collective, which ends with the last of them: at once, or after the one before has ended.
  void start(EngineOpPtr op);
  void then(EngineOpPtr op);
  // Reduces what this rank and the others of its rail have of a tensor, in place.
  void reduce_between(const at::Tensor& part, ReduceOp op);
  WorkPtr work(::c10d::OpType type);
  int hosts() const { return static_cast<int>(ranks_.size()); }

  const RanksOfHosts ranks_;
  int host_of_rank_ = 0;  // the index of this rank's host
  const std::shared_ptr<HostEngine> engine_;
  const BackendPtr rail_, all_;
  EngineOpPtr last_;
};

}  // namespace tessera::comm
