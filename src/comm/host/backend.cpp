#include "comm/host/backend.h"

#include <utility>

#include "comm/host/engine_work.h"
#include "comm/host/reduce.h"

namespace tessera::comm {

namespace {

using Tensors = std::vector<at::Tensor>;

// A tensor of at most so many bytes, or of two ranks, is reduced by all ranks, each all of it: one exchange instead of
// two.
constexpr std::size_t kSmallBytes = std::size_t{64} << 10;

}  // namespace

HostBackend::HostBackend(std::unique_ptr<Host> host, std::shared_ptr<HostEngines> engines)
    : Backend(host->rank(), host->size()), engine_(std::make_shared<HostEngine>(std::move(host), engines)) {
  engines->add(engine_);
}

WorkPtr HostBackend::start(const EngineOpPtr& op, ::c10d::OpType type) {
  engine_->start(op);
  return c10::make_intrusive<EngineWork>(getRank(), type, engine_, op);
}

WorkPtr HostBackend::broadcast(Tensors& tensors, const ::c10d::BroadcastOptions& options) {
  return start(broadcast_op(engine_->host(), tensors.at(0), static_cast<int>(options.rootRank)),
               ::c10d::OpType::BROADCAST);
}

WorkPtr HostBackend::allreduce(Tensors& tensors, const ::c10d::AllreduceOptions& options) {
  return start_all_reduce(tensors.at(0), tensors[0], reduction_of(options.reduceOp));
}

WorkPtr HostBackend::start_all_reduce(const at::Tensor& output, const at::Tensor& input, ReduceOp op) {
  if (getSize() == 2 || output.nbytes() <= kSmallBytes) {
    return start(all_reduce_op(engine_->host(), output, input, op), ::c10d::OpType::ALLREDUCE);
  }
  const Tensors parts = parts_of(output, getSize());
  engine_->start(reduce_scatter_op(engine_->host(), parts[static_cast<std::size_t>(getRank())],
                                   each_piece(parts_of(input, getSize())), {input}, op));
  const EngineOpPtr gathering = all_gather_op(engine_->host(), each_alone(parts));
  engine_->start(gathering, /*after_previous=*/true);
  return c10::make_intrusive<EngineWork>(getRank(), ::c10d::OpType::ALLREDUCE, engine_, gathering);
}

WorkPtr HostBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                     const ::c10d::AllgatherOptions& /*options*/) {
  const Tensors parts = parts_of(output, getSize());
  const at::Tensor& own = parts[static_cast<std::size_t>(getRank())];
  if (own.data_ptr() != input.data_ptr()) own.copy_(input.view({-1}));
  return start(all_gather_op(engine_->host(), each_alone(parts)), ::c10d::OpType::_ALLGATHER_BASE);
}

WorkPtr HostBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                          const ::c10d::ReduceScatterOptions& options) {
  return start_reduce_scatter(output, each_piece(parts_of(input, getSize())), {input}, reduction_of(options.reduceOp));
}

WorkPtr HostBackend::start_reduce_scatter(const at::Tensor& output, std::vector<MemoryPieces> parts,
                                          std::vector<at::Tensor> kept, ReduceOp op) {
  return start(reduce_scatter_op(engine_->host(), output, std::move(parts), std::move(kept), op),
               ::c10d::OpType::_REDUCE_SCATTER_BASE);
}

WorkPtr HostBackend::alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<std::int64_t>& output_splits,
                                   std::vector<std::int64_t>& input_splits,
                                   const ::c10d::AllToAllOptions& /*options*/) {
  const Tensors outs = divided(output, output_splits), ins = divided(input, input_splits);
  const auto own = static_cast<std::size_t>(getRank());
  outs[own].copy_(ins[own]);
  return start_all_to_all(each_piece(outs), each_piece(ins), {output, input});
}

WorkPtr HostBackend::start_all_to_all(const std::vector<MemoryPieces>& outs, const std::vector<MemoryPieces>& ins,
                                      std::vector<at::Tensor> kept) {
  return start(all_to_all_op(engine_->host(), outs, ins, std::move(kept)), ::c10d::OpType::ALLTOALL_BASE);
}

WorkPtr HostBackend::barrier(const ::c10d::BarrierOptions& /*options*/) {
  return start(barrier_op(engine_->host()), ::c10d::OpType::BARRIER);
}

}  // namespace tessera::comm
