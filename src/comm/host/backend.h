#pragma once
// A backend of c10d whose ranks share a host's memory. It gathers into one buffer, carries and reduces every dtype, in
// the order of the ranks, and averages; so all ranks have the same bits, and they are those of the sum in one process.

#include <memory>
#include <vector>

#include "comm/c10d.h"
#include "comm/host/engine.h"

namespace tessera::comm {

class HostBackend final : public Backend {
 public:
  HostBackend(std::unique_ptr<Host> host, std::shared_ptr<HostEngines> engines);

  const std::shared_ptr<HostEngine>& engine() const { return engine_; }

  const std::string getBackendName() const override { return "host"; }  // NOLINT(readability-const-return-type): c10d's
  WorkPtr broadcast(std::vector<at::Tensor>& tensors, const ::c10d::BroadcastOptions& options) override;
  WorkPtr allreduce(std::vector<at::Tensor>& tensors, const ::c10d::AllreduceOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const ::c10d::AllgatherOptions& options) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const ::c10d::ReduceScatterOptions& options) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<std::int64_t>& output_splits,
                        std::vector<std::int64_t>& input_splits, const ::c10d::AllToAllOptions& options) override;
  // The same as alltoall_base between pieces of memory, as allreduce into another tensor, and as _reduce_scatter_base
  // of parts in pieces, of which each rank may have another number of bytes.
  WorkPtr start_all_to_all(const std::vector<MemoryPieces>& outs, const std::vector<MemoryPieces>& ins,
                           std::vector<at::Tensor> kept);
  WorkPtr start_all_reduce(const at::Tensor& output, const at::Tensor& input, ReduceOp op);
  WorkPtr start_reduce_scatter(const at::Tensor& output, std::vector<MemoryPieces> parts, std::vector<at::Tensor> kept,
                               ReduceOp op);
  WorkPtr barrier(const ::c10d::BarrierOptions& options) override;

 private:
  WorkPtr start(const EngineOpPtr& op, ::c10d::OpType type);

  std::shared_ptr<HostEngine> engine_;
};

}  // namespace tessera::comm
