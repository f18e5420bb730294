#include "support/accelerator/nccl/backend.h"

#include <ATen/core/ivalue.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <utility>

#include "support/accelerator/allocator.h"
#include "support/accelerator/device.h"

namespace tessera::sim {

namespace {

using at::Tensor;
using WorkPtr = NcclBackend::WorkPtr;
using Tensors = NcclBackend::Tensors;
using TensorLists = NcclBackend::TensorLists;

::c10d::OpType op_type(Collective collective) {
  switch (collective) {
    case Collective::all_reduce:
      return ::c10d::OpType::ALLREDUCE;
    case Collective::reduce:
      return ::c10d::OpType::REDUCE;
    case Collective::broadcast:
      return ::c10d::OpType::BROADCAST;
    case Collective::all_gather:
      return ::c10d::OpType::ALLGATHER;
    case Collective::gather:
      return ::c10d::OpType::GATHER;
    case Collective::reduce_scatter:
      return ::c10d::OpType::REDUCE_SCATTER;
    case Collective::scatter:
      return ::c10d::OpType::SCATTER;
    case Collective::all_to_all:
      return ::c10d::OpType::ALLTOALL;
    case Collective::barrier:
      return ::c10d::OpType::BARRIER;
    case Collective::message:
      return ::c10d::OpType::SEND;
  }
  return ::c10d::OpType::UNKNOWN;
}

class NcclWork final : public ::c10d::Work {
 public:
  NcclWork(int rank, Collective collective, StreamKey stream, std::vector<PointPtr> points, Tensors results,
           Tensors kept)
      : Work(rank, op_type(collective)),
        collective_(collective),
        device_(stream.device),
        points_(std::move(points)),
        results_(std::move(results)),
        kept_(std::move(kept)),
        future_(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                         std::vector<c10::Device>{device(device_)})) {
    const c10::StreamGuard guard(stream_of(stream));
    future_->markCompleted(c10::IValue(results_));
  }

  bool isCompleted() override {
    return std::all_of(points_.begin(), points_.end(),
                       [](const PointPtr& point) { return Engine::get().query(point); });
  }
  bool isSuccess() const override { return true; }
  std::vector<Tensor> result() override { return results_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  void synchronize() override {
    for (const PointPtr& point : points_) Engine::get().wait(current_stream(device_), point);
    kept_.clear();
  }
  bool wait(std::chrono::milliseconds /*timeout*/) override {
    synchronize();
    if (collective_ == Collective::barrier)
      Engine::get().synchronize_stream(current_stream(device_), Engine::Kind::stream);
    return true;
  }
  const std::vector<PointPtr>& points() const { return points_; }
  int device_index() const { return device_; }
  Tensors take_kept() { return std::exchange(kept_, {}); }

 private:
  Collective collective_;
  int device_;
  std::vector<PointPtr> points_;
  Tensors results_, kept_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

void check(const Tensor& tensor) {
  TORCH_CHECK(tensor.is_privateuseone() && tensor.layout() == at::kStrided,
              "Tensors must be sim and dense: found a tensor on ", tensor.device());
  TORCH_CHECK(tensor.is_contiguous(), "Tensors must be contiguous");
}

void check_one(const Tensors& tensors) {
  TORCH_CHECK(tensors.size() == 1, "Expecting one tensor only but got ", tensors.size());
}

void check_alike(const Tensor& output, const Tensor& input) {
  TORCH_CHECK(output.scalar_type() == input.scalar_type(), "output tensor must have the same type as input tensor");
}

// The parts of a tensor that has one for each rank.
void add_chunks(Tensors& to, const Tensor& tensor, int ranks) {
  const Tensor flat = tensor.view({-1});
  const std::int64_t size = tensor.numel() / ranks;
  for (int rank = 0; rank < ranks; ++rank) to.push_back(flat.narrow(0, rank * size, size));
}

// The parts along the first dimension.
Tensors split_rows(const Tensor& tensor, const std::vector<std::int64_t>& splits, int ranks) {
  check(tensor);
  Tensors parts;
  if (splits.empty()) {
    TORCH_CHECK(tensor.size(0) % ranks == 0, "Tensor's dim 0 does not divide equally across group size");
    add_chunks(parts, tensor, ranks);
    return parts;
  }
  TORCH_CHECK(splits.size() == static_cast<std::size_t>(ranks), "Number of tensor splits not equal to group size");
  std::int64_t row = 0;
  for (const std::int64_t split : splits) {
    parts.push_back(tensor.narrow(0, row, split));
    row += split;
  }
  TORCH_CHECK(row == tensor.size(0), "Split sizes doesn't match total dim 0 size");
  return parts;
}

void check_parts(const Tensor& full, const Tensor& part, int ranks, const char* what) {
  check(full);
  check(part);
  check_alike(full, part);
  TORCH_CHECK(full.numel() == part.numel() * ranks, what);
}

}  // namespace

NcclBackend::NcclBackend(const std::string& group_name, int rank, int size)
    : Backend(rank, size), name_(group_name), group_(Group::join(group_name, size)) {}

c10::intrusive_ptr<NcclBackend> NcclBackend::make_subgroup(const std::optional<SplitOptions>& options) {
  connect();
  if (!options) return {};
  return c10::make_intrusive<NcclBackend>(name_ + "/" + std::to_string(options->color), options->rank, options->size);
}

namespace {

std::string exchange_name(::c10d::Store& store, int rank) {
  const std::string key = "sim_nccl_name";
  if (rank == 0) {
    const std::string name = Group::new_name();
    store.set(key, std::vector<std::uint8_t>(name.begin(), name.end()));
    return name;
  }
  const std::vector<std::uint8_t> name = store.get(key);
  return {name.begin(), name.end()};
}

}  // namespace

NcclBackend::NcclBackend(const c10::intrusive_ptr<::c10d::Store>& store, int rank, int size)
    : NcclBackend(exchange_name(*store, rank), rank, size) {}

StreamKey NcclBackend::collective_stream(int device) {
  const auto found = streams_.find(device);
  return found != streams_.end() ? found->second
                                 : streams_.emplace(device, Engine::get().new_stream(device)).first->second;
}

void NcclBackend::order_streams(StreamKey stream, Contribution& contribution) {
  Engine::get().wait(stream, Engine::get().record(current_stream(stream.device)));
  for (const Tensors& tensors : {contribution.inputs, contribution.outputs})
    kept_.insert(kept_.end(), tensors.begin(), tensors.end());
  for (const Tensor& tensor : contribution.inputs) contribution.part.inputs.emplace_back(tensor);
  for (const Tensor& tensor : contribution.outputs) contribution.part.outputs.emplace_back(tensor);
}

WorkPtr NcclBackend::work_of(Collective collective, StreamKey stream, Tensors results) {
  WorkPtr work =
      c10::make_intrusive<NcclWork>(getRank(), collective, stream, std::vector<PointPtr>{Engine::get().record(stream)},
                                    std::move(results), std::exchange(kept_, {}));
  if (coalesced_) coalesced_->push_back(work);
  return work;
}

WorkPtr NcclBackend::start(Contribution contribution, Tensors results) {
  for (const Tensors& tensors : {contribution.inputs, contribution.outputs}) {
    for (const Tensor& tensor : tensors) check(tensor);
  }
  const Collective collective = contribution.part.collective;
  connect_for(collective);
  const Tensor any = !contribution.inputs.empty()    ? contribution.inputs[0]
                     : !contribution.outputs.empty() ? contribution.outputs[0]
                                                     : Tensor();
  const int index = any.defined() ? any.device().index() : current_device();
  const StreamKey stream = collective_stream(index);
  order_streams(stream, contribution);
  group_->enqueue(++calls_, getRank(), stream, std::move(contribution.part));
  return work_of(collective, stream, std::move(results));
}

WorkPtr NcclBackend::start_message(Contribution contribution, int source, int destination, const Tensor& tensor) {
  check(tensor);
  // Messages of one group call connect together, in no order.
  if (!coalesced_) group_->connect(getRank(), {source, destination, is_connected_});
  const std::pair<int, int> direction(source, destination);
  auto stream = message_streams_.find(direction);
  if (stream == message_streams_.end())
    stream = message_streams_.emplace(direction, Engine::get().new_stream(tensor.device().index())).first;
  order_streams(stream->second, contribution);
  group_->enqueue_message(++messages_[direction], source, destination, getRank(), stream->second,
                          std::move(contribution.part));
  return work_of(Collective::message, stream->second, {tensor});
}

void NcclBackend::startCoalescing() { coalesced_.emplace(); }

WorkPtr NcclBackend::endCoalescing() {
  TORCH_CHECK(coalesced_ && !coalesced_->empty(), "sim: endCoalescing: no call was coalesced");
  const std::vector<WorkPtr> works = *std::exchange(coalesced_, std::nullopt);
  std::vector<PointPtr> points;
  Tensors results, kept;
  int index = 0;
  for (const WorkPtr& work : works) {
    auto& part = static_cast<NcclWork&>(*work);
    points.insert(points.end(), part.points().begin(), part.points().end());
    const Tensors more = work->result();
    results.insert(results.end(), more.begin(), more.end());
    for (Tensor& tensor : part.take_kept()) kept.push_back(std::move(tensor));
    index = part.device_index();
  }
  return c10::make_intrusive<NcclWork>(getRank(), Collective::all_reduce, collective_stream(index), std::move(points),
                                       std::move(results), std::move(kept));
}

WorkPtr NcclBackend::broadcast(Tensors& tensors, const ::c10d::BroadcastOptions& options) {
  check_one(tensors);
  return start({{Collective::broadcast, {}, static_cast<int>(options.rootRank)}, tensors, tensors}, tensors);
}

WorkPtr NcclBackend::allreduce(Tensors& tensors, const ::c10d::AllreduceOptions& options) {
  check_one(tensors);
  return start({{Collective::all_reduce, options.reduceOp.op_}, tensors, tensors}, tensors);
}

WorkPtr NcclBackend::allreduce_coalesced(Tensors& tensors, const ::c10d::AllreduceCoalescedOptions& options) {
  return start({{Collective::all_reduce, options.reduceOp.op_}, tensors, tensors}, tensors);
}

WorkPtr NcclBackend::reduce(Tensors& tensors, const ::c10d::ReduceOptions& options) {
  check_one(tensors);
  return start({{Collective::reduce, options.reduceOp.op_, static_cast<int>(options.rootRank)}, tensors, tensors},
               tensors);
}

WorkPtr NcclBackend::_allgather_base(Tensor& output, Tensor& input, const ::c10d::AllgatherOptions& options) {
  Tensors outputs = {output}, inputs = {input};
  return allgather_into_tensor_coalesced(outputs, inputs, options);
}

WorkPtr NcclBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                     const ::c10d::AllgatherOptions& /*options*/) {
  Contribution all{{Collective::all_gather}, inputs, {}};
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    check_parts(outputs.at(i), inputs[i], getSize(),
                "output tensor size must be equal to world_size times input tensor size");
    add_chunks(all.outputs, outputs[i], getSize());
  }
  return start(std::move(all), outputs);
}

// As NCCL's: the parts are gathered into a flat tensor and copied to the outputs on the backend's stream.
WorkPtr NcclBackend::allgather(TensorLists& outputs, Tensors& inputs, const ::c10d::AllgatherOptions& /*options*/) {
  check_one(inputs);
  TORCH_CHECK(outputs.size() == 1 && outputs[0].size() == static_cast<std::size_t>(getSize()),
              "Tensor list input to scatter/gather must match number of collective participants");
  check(inputs[0]);
  for (const Tensor& output : outputs[0]) {
    check_alike(output, inputs[0]);
    TORCH_CHECK(output.is_privateuseone(), "Tensors must be sim and dense: found a tensor on ", output.device());
    TORCH_CHECK(output.numel() == inputs[0].numel(),
                "All tensor operands to scatter/gather must have the same number of elements");
  }
  connect_for(Collective::all_gather);
  const StreamKey stream = collective_stream(inputs[0].device().index());
  Tensor flat = at::empty({getSize() * inputs[0].numel()}, inputs[0].options());
  Contribution all{{Collective::all_gather}, inputs, {}};
  add_chunks(all.outputs, flat, getSize());
  const Tensors parts = all.outputs;
  order_streams(stream, all);
  group_->enqueue(++calls_, getRank(), stream, std::move(all.part));
  for (std::size_t rank = 0; rank < parts.size(); ++rank) {
    Engine::get().enqueue(stream, "copy", [to = RawTensor(outputs[0][rank]), from = RawTensor(parts[rank])] {
      to.on_cpu().copy_(from.on_cpu().view(to.sizes));
    });
    kept_.push_back(outputs[0][rank]);
  }
  return work_of(Collective::all_gather, stream, outputs[0]);
}

WorkPtr NcclBackend::gather(TensorLists& outputs, Tensors& inputs, const ::c10d::GatherOptions& options) {
  check_one(inputs);
  const bool receives = getRank() == options.rootRank;
  if (receives) {
    TORCH_CHECK(outputs.size() == 1 && outputs[0].size() == static_cast<std::size_t>(getSize()),
                "Incorrect output list size. Output list size should be ", getSize(),
                ", same as size of the process group.");
  } else {
    TORCH_CHECK(outputs.empty(), "requires empty output on non-root");
  }
  const Tensors to = receives ? outputs[0] : Tensors();
  return start({{Collective::gather, {}, static_cast<int>(options.rootRank)}, inputs, to}, to);
}

WorkPtr NcclBackend::scatter(Tensors& outputs, TensorLists& inputs, const ::c10d::ScatterOptions& options) {
  check_one(outputs);
  const bool sends = getRank() == options.rootRank;
  if (sends) {
    TORCH_CHECK(inputs.size() == 1 && inputs[0].size() == static_cast<std::size_t>(getSize()),
                "Incorrect input list size. Input list size should be ", getSize(),
                ", same as size of the process group.");
  } else {
    TORCH_CHECK(inputs.empty(), "requires empty input on non-root");
  }
  return start({{Collective::scatter, {}, static_cast<int>(options.rootRank)}, sends ? inputs[0] : Tensors(), outputs},
               outputs);
}

WorkPtr NcclBackend::_reduce_scatter_base(Tensor& output, Tensor& input, const ::c10d::ReduceScatterOptions& options) {
  Tensors outputs = {output}, inputs = {input};
  return reduce_scatter_tensor_coalesced(outputs, inputs, options);
}

WorkPtr NcclBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                     const ::c10d::ReduceScatterOptions& options) {
  Contribution all{{Collective::reduce_scatter, options.reduceOp.op_}, {}, outputs};
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    check_parts(inputs.at(i), outputs[i], getSize(),
                "input tensor must be the same size as output size times world size");
    add_chunks(all.inputs, inputs[i], getSize());
  }
  return start(std::move(all), outputs);
}

WorkPtr NcclBackend::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                    const ::c10d::ReduceScatterOptions& options) {
  check_one(outputs);
  TORCH_CHECK(inputs.size() == 1 && inputs[0].size() == static_cast<std::size_t>(getSize()),
              "invalid input tensor list size");
  for (const Tensor& input : inputs[0]) check_alike(outputs[0], input);
  return start({{Collective::reduce_scatter, options.reduceOp.op_}, inputs[0], outputs}, outputs);
}

WorkPtr NcclBackend::alltoall_base(Tensor& output, Tensor& input, std::vector<std::int64_t>& output_splits,
                                   std::vector<std::int64_t>& input_splits,
                                   const ::c10d::AllToAllOptions& /*options*/) {
  check_alike(output, input);
  return start({{Collective::all_to_all},
                split_rows(input, input_splits, getSize()),
                split_rows(output, output_splits, getSize())},
               {output});
}

WorkPtr NcclBackend::alltoall(Tensors& outputs, Tensors& inputs, const ::c10d::AllToAllOptions& /*options*/) {
  TORCH_CHECK(inputs.size() == static_cast<std::size_t>(getSize()) && outputs.size() == inputs.size(),
              "Number of input and output tensors not equal to group size");
  return start({{Collective::all_to_all}, inputs, outputs}, outputs);
}

WorkPtr NcclBackend::send(Tensors& tensors, int destination, int /*tag*/) {
  check_one(tensors);
  return start_message({{Collective::message}, tensors, {}}, getRank(), destination, tensors[0]);
}

WorkPtr NcclBackend::recv(Tensors& tensors, int source, int /*tag*/) {
  check_one(tensors);
  return start_message({{Collective::message}, {}, tensors}, source, getRank(), tensors[0]);
}

WorkPtr NcclBackend::barrier(const ::c10d::BarrierOptions& options) {
  const c10::DeviceGuard guard(
      device(options.device_ids.empty() ? current_device() : static_cast<int>(options.device_ids[0])));
  return start({{Collective::barrier}, {}, {}}, {});
}

}  // namespace tessera::sim
