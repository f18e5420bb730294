#include "comm/host/backend.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace tessera::comm {

namespace {

using Tensors = std::vector<at::Tensor>;

// A tensor of at most so many bytes is reduced by all ranks, each all of it: there is one exchange instead of two.
constexpr std::size_t kSmallBytes = std::size_t{64} << 10;

class HostWork final : public ::c10d::Work {
 public:
  HostWork(int rank, ::c10d::OpType type, std::shared_ptr<HostEngine> engine, HostOpPtr op)
      : Work(rank, type), engine_(std::move(engine)), op_(std::move(op)) {}

  bool isCompleted() override { return engine_->has_ended(*op_); }
  bool isSuccess() const override { return engine_->has_ended(*op_); }
  bool wait(std::chrono::milliseconds timeout) override {
    constexpr std::chrono::hours kNoLimit(24 * 365);
    if (!engine_->wait(*op_, timeout.count() > 0 ? timeout : kNoLimit)) throw std::runtime_error("wait: timeout");
    return true;
  }

 private:
  std::shared_ptr<HostEngine> engine_;
  HostOpPtr op_;
};

ReduceOp reduction_of(const ::c10d::ReduceOp& op) {
  using Type = ::c10d::ReduceOp::RedOpType;
  switch (static_cast<Type>(op)) {
    case Type::AVG:
      return ReduceOp::average;
    case Type::PRODUCT:
      return ReduceOp::product;
    case Type::MIN:
      return ReduceOp::min;
    case Type::MAX:
      return ReduceOp::max;
    default:
      return ReduceOp::sum;
  }
}

// Divides a tensor into a part for each rank, as equal as possible.
Tensors parts_of(const at::Tensor& tensor, int ranks) {
  const at::Tensor flat = tensor.view({-1});
  const std::int64_t numel = flat.numel(), most = (numel + ranks - 1) / ranks;
  Tensors parts;
  for (int r = 0; r < ranks; ++r) {
    const std::int64_t begin = std::min(r * most, numel);
    parts.push_back(flat.narrow(0, begin, std::min(most, numel - begin)));
  }
  return parts;
}

std::vector<MemoryPieces> pieces_of_all(const Tensors& parts) {
  std::vector<MemoryPieces> pieces;
  for (const at::Tensor& part : parts) pieces.push_back(pieces_of(part));
  return pieces;
}

Tensors divided(const at::Tensor& tensor, const std::vector<std::int64_t>& splits) {
  const at::Tensor flat = tensor.view({-1});
  Tensors parts;
  std::int64_t begin = 0;
  for (const std::int64_t numel : splits) {
    parts.push_back(flat.narrow(0, begin, numel));
    begin += numel;
  }
  return parts;
}

}  // namespace

HostBackend::HostBackend(std::unique_ptr<Host> host, std::shared_ptr<HostEngines> engines)
    : Backend(host->rank(), host->size()), engine_(std::make_shared<HostEngine>(std::move(host), engines)) {
  engines->add(engine_);
}

WorkPtr HostBackend::start(const HostOpPtr& op, ::c10d::OpType type) {
  engine_->start(op);
  return c10::make_intrusive<HostWork>(getRank(), type, engine_, op);
}

WorkPtr HostBackend::broadcast(Tensors& tensors, const ::c10d::BroadcastOptions& options) {
  return start(broadcast_op(engine_->host(), tensors.at(0), static_cast<int>(options.rootRank)),
               ::c10d::OpType::BROADCAST);
}

WorkPtr HostBackend::allreduce(Tensors& tensors, const ::c10d::AllreduceOptions& options) {
  const at::Tensor& tensor = tensors.at(0);
  const ReduceOp op = reduction_of(options.reduceOp);
  if (tensor.nbytes() <= kSmallBytes)
    return start(all_reduce_op(engine_->host(), tensor, op), ::c10d::OpType::ALLREDUCE);
  const Tensors parts = parts_of(tensor, getSize());
  engine_->start(reduce_scatter_op(engine_->host(), parts[static_cast<std::size_t>(getRank())], pieces_of_all(parts),
                                   {tensor}, op));
  const HostOpPtr gathering = all_gather_op(engine_->host(), parts);
  engine_->start(gathering, /*after_previous=*/true);
  return c10::make_intrusive<HostWork>(getRank(), ::c10d::OpType::ALLREDUCE, engine_, gathering);
}

WorkPtr HostBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                     const ::c10d::AllgatherOptions& /*options*/) {
  const Tensors parts = parts_of(output, getSize());
  const at::Tensor& own = parts[static_cast<std::size_t>(getRank())];
  if (own.data_ptr() != input.data_ptr()) own.copy_(input.view({-1}));
  return start(all_gather_op(engine_->host(), parts), ::c10d::OpType::_ALLGATHER_BASE);
}

WorkPtr HostBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                          const ::c10d::ReduceScatterOptions& options) {
  return start_reduce_scatter(output, pieces_of_all(parts_of(input, getSize())), {input},
                              reduction_of(options.reduceOp));
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
  return start(all_to_all_op(engine_->host(), outs, ins), ::c10d::OpType::ALLTOALL_BASE);
}

WorkPtr HostBackend::barrier(const ::c10d::BarrierOptions& /*options*/) {
  return start(barrier_op(engine_->host()), ::c10d::OpType::BARRIER);
}

}  // namespace tessera::comm
