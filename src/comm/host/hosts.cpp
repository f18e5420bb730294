#include "comm/host/hosts.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "comm/host/engine_work.h"
#include "comm/host/reduce.h"

namespace tessera::comm {

namespace {

using Tensors = std::vector<at::Tensor>;
using Splits = std::vector<std::int64_t>;

// Hosts send each other so few bytes as they are, which takes one exchange instead of two.
constexpr std::size_t kOneExchangeBytes = std::size_t{64} << 10;

// Work between hosts, as a step of the engine.
class LinkOp final : public EngineOp {
 public:
  LinkOp(std::function<WorkPtr()> begin, std::function<void()> finish)
      : begin_(std::move(begin)), finish_(std::move(finish)) {}

  bool send(Host& host) override {
    future_ = begin_()->getFuture();
    future_->addCallback([ring = host.own_bell()](c10::ivalue::Future& /*future*/) { ring(); });
    return true;
  }
  // The future has the result before the work calls itself completed.
  bool receive(Host& /*host*/) override {
    if (future_ == nullptr || !future_->completed()) return false;
    if (future_->hasError()) throw std::runtime_error(future_->tryRetrieveErrorMessage());
    if (finish_) finish_();
    return true;
  }
  bool awaits(int /*r*/) const override { return false; }
  bool is_on_link() const override { return true; }

 private:
  const std::function<WorkPtr()> begin_;
  const std::function<void()> finish_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// Returns a step that begins work, and runs `finish` after it.
EngineOpPtr link_op(std::function<WorkPtr()> begin, std::function<void()> finish = {}) {
  return std::make_shared<LinkOp>(std::move(begin), std::move(finish));
}

// Returns the memory of a contiguous tensor as bytes, since backends do not carry every dtype.
at::Tensor as_bytes(const at::Tensor& tensor) {
  return at::from_blob(
      tensor.data_ptr(), {static_cast<std::int64_t>(tensor.nbytes())}, [kept = tensor](void*) {}, at::kByte);
}

Tensors as_bytes(const Tensors& tensors) {
  Tensors bytes;
  for (const at::Tensor& tensor : tensors) bytes.push_back(as_bytes(tensor));
  return bytes;
}

Splits sizes_in_bytes(const Tensors& tensors) {
  Splits sizes;
  for (const at::Tensor& tensor : tensors) sizes.push_back(static_cast<std::int64_t>(tensor.nbytes()));
  return sizes;
}

// Reduces the rows of `rows` to `out`, in their order, and divides an average by `ranks`.
void reduce_rows(const at::Tensor& out, const at::Tensor& rows, ReduceOp op, int ranks) {
  std::vector<const void*> sources;
  for (std::int64_t i = 0; i < rows.size(0); ++i) sources.push_back(rows[i].data_ptr());
  reduce_elements(out.scalar_type(), op == ReduceOp::average ? ReduceOp::sum : op, out.data_ptr(), sources,
                  out.numel());
  if (op == ReduceOp::average) out.div_(ranks);
}

// An average is a sum until hosts have added theirs.
ReduceOp within_host(ReduceOp op) { return op == ReduceOp::average ? ReduceOp::sum : op; }

at::Tensor rows_like(const at::Tensor& row, int rows) {
  return at::empty({rows, row.numel()}, row.options().requires_grad(false));
}

}  // namespace

HostsBackend::HostsBackend(int rank, RanksOfHosts ranks_of_hosts, std::unique_ptr<Host> host, BackendPtr rail,
                           BackendPtr all, const std::shared_ptr<HostEngines>& engines)
    : Backend(rank, static_cast<int>(ranks_of_hosts.size() * ranks_of_hosts.at(0).size())),
      ranks_(std::move(ranks_of_hosts)),
      engine_(std::make_shared<HostEngine>(std::move(host), engines)),
      rail_(std::move(rail)),
      all_(std::move(all)) {
  const auto own = std::find_if(ranks_.begin(), ranks_.end(), [&](const std::vector<int>& ranks) {
    return std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
  });
  host_of_rank_ = static_cast<int>(own - ranks_.begin());
  engines->add(engine_);
}

void HostsBackend::start(EngineOpPtr op) {
  last_ = std::move(op);
  engine_->start(last_);
}

void HostsBackend::then(EngineOpPtr op) {
  last_ = std::move(op);
  engine_->start(last_, /*after_previous=*/true);
}

WorkPtr HostsBackend::work(::c10d::OpType type) {
  return c10::make_intrusive<EngineWork>(getRank(), type, engine_, std::exchange(last_, nullptr));
}

void HostsBackend::reduce_between(const at::Tensor& part, ReduceOp op) {
  if (part.numel() == 0) return;  // on all ranks of the rail
  const int ranks = getSize();
  if (part.nbytes() <= kOneExchangeBytes) {
    const at::Tensor rows = rows_like(part, hosts());
    then(link_op(
        [rail = rail_, part, rows] {
          std::vector<Tensors> outs{as_bytes(rows.unbind())};
          Tensors ins{as_bytes(part)};
          return rail->allgather(outs, ins);
        },
        [part, rows, op, ranks] { reduce_rows(part, rows, op, ranks); }));
    return;
  }
  // Each host reduces a part of it, of which the last may be smaller.
  const Tensors parts = parts_of(part, hosts());
  const at::Tensor& own = parts[static_cast<std::size_t>(host_of_rank_)];
  const at::Tensor rows = rows_like(own, hosts()), reduced = rows_like(parts[0], hosts());
  then(link_op(
      [rail = rail_, part, parts, rows] {
        at::Tensor to = as_bytes(rows), from = as_bytes(part);
        Splits to_splits = sizes_in_bytes(rows.unbind()), from_splits = sizes_in_bytes(parts);
        return rail->alltoall_base(to, from, to_splits, from_splits);
      },
      [own, rows, op, ranks] { reduce_rows(own, rows, op, ranks); }));
  then(link_op(
      [rail = rail_, own, reduced] {
        const at::Tensor padded = at::empty_like(reduced[0]);
        padded.narrow(0, 0, own.numel()).copy_(own);
        std::vector<Tensors> outs{as_bytes(reduced.unbind())};
        Tensors ins{as_bytes(padded)};
        return rail->allgather(outs, ins);
      },
      [parts, reduced] {
        for (std::size_t h = 0; h < parts.size(); ++h)
          parts[h].copy_(reduced[static_cast<std::int64_t>(h)].narrow(0, 0, parts[h].numel()));
      }));
}

WorkPtr HostsBackend::allreduce(Tensors& tensors, const ::c10d::AllreduceOptions& options) {
  const Host& host = engine_->host();
  const ReduceOp op = reduction_of(options.reduceOp);
  const Tensors parts = parts_of(tensors.at(0), host.size());
  const at::Tensor& own = parts[static_cast<std::size_t>(host.rank())];
  start(reduce_scatter_op(host, own, each_piece(parts), {tensors[0]}, within_host(op)));
  reduce_between(own, op);
  then(all_gather_op(host, each_alone(parts)));
  return work(::c10d::OpType::ALLREDUCE);
}

WorkPtr HostsBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                           const ::c10d::ReduceScatterOptions& options) {
  const Host& host = engine_->host();
  const ReduceOp op = reduction_of(options.reduceOp);
  const Tensors parts = parts_of(input, getSize());
  std::vector<MemoryPieces> of_rails(static_cast<std::size_t>(host.size()));
  for (const std::vector<int>& ranks : ranks_) {
    for (std::size_t l = 0; l < ranks.size(); ++l) {
      const MemoryPieces pieces = pieces_of(parts[static_cast<std::size_t>(ranks[l])]);
      of_rails[l].insert(of_rails[l].end(), pieces.begin(), pieces.end());
    }
  }
  const at::Tensor of_host = rows_like(output, hosts()), of_all = rows_like(output, hosts());
  start(reduce_scatter_op(host, of_host, std::move(of_rails), {input}, within_host(op)));
  then(link_op(
      [rail = rail_, of_host, of_all] {
        at::Tensor to = as_bytes(of_all), from = as_bytes(of_host);
        Splits to_splits = sizes_in_bytes(of_all.unbind()), from_splits = to_splits;
        return rail->alltoall_base(to, from, to_splits, from_splits);
      },
      [out = output, of_all, op, ranks = getSize()] { reduce_rows(out, of_all, op, ranks); }));
  return work(::c10d::OpType::_REDUCE_SCATTER_BASE);
}

WorkPtr HostsBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                      const ::c10d::AllgatherOptions& /*options*/) {
  const Host& host = engine_->host();
  const Tensors parts = parts_of(output, getSize());
  std::vector<Tensors> of_rails(static_cast<std::size_t>(host.size()));
  for (const std::vector<int>& ranks : ranks_) {
    for (std::size_t l = 0; l < ranks.size(); ++l) of_rails[l].push_back(parts[static_cast<std::size_t>(ranks[l])]);
  }
  start(link_op([rail = rail_, in = input, outs = of_rails[static_cast<std::size_t>(host.rank())]] {
    std::vector<Tensors> to{as_bytes(outs)};
    Tensors from{as_bytes(in)};
    return rail->allgather(to, from);
  }));
  then(all_gather_op(host, of_rails));
  return work(::c10d::OpType::_ALLGATHER_BASE);
}

WorkPtr HostsBackend::broadcast(Tensors& tensors, const ::c10d::BroadcastOptions& options) {
  const Host& host = engine_->host();
  const at::Tensor& tensor = tensors.at(0);
  const auto root = static_cast<int>(options.rootRank);
  ::c10d::BroadcastOptions between;
  int place = 0;
  for (int h = 0; h < hosts(); ++h) {
    const std::vector<int>& ranks = ranks_[static_cast<std::size_t>(h)];
    const auto found = std::find(ranks.begin(), ranks.end(), root);
    if (found == ranks.end()) continue;
    between.rootRank = h;
    place = static_cast<int>(found - ranks.begin());
  }
  const bool is_on_root_host = between.rootRank == host_of_rank_;
  if (is_on_root_host) start(broadcast_op(host, tensor, place));
  const Tensors parts = parts_of(tensor, host.size());
  if (const at::Tensor& own = parts[static_cast<std::size_t>(host.rank())]; own.numel() > 0) {
    const EngineOpPtr moving = link_op([rail = rail_, own, between] {
      Tensors part{as_bytes(own)};
      return rail->broadcast(part, between);
    });
    is_on_root_host ? then(moving) : start(moving);
  }
  if (!is_on_root_host) then(all_gather_op(host, each_alone(parts)));
  return work(::c10d::OpType::BROADCAST);
}

WorkPtr HostsBackend::alltoall_base(at::Tensor& output, at::Tensor& input, Splits& output_splits, Splits& input_splits,
                                    const ::c10d::AllToAllOptions& /*options*/) {
  const Host& host = engine_->host();
  Tensors outs = divided(output, output_splits), ins = divided(input, input_splits);
  const auto own = static_cast<std::size_t>(getRank());
  outs[own].copy_(ins[own]);
  Tensors host_outs, host_ins;
  for (const int r : ranks_[static_cast<std::size_t>(host_of_rank_)]) {
    // What is within the host has no part on the link.
    host_outs.push_back(std::exchange(outs[static_cast<std::size_t>(r)], output.view({-1}).narrow(0, 0, 0)));
    host_ins.push_back(std::exchange(ins[static_cast<std::size_t>(r)], input.view({-1}).narrow(0, 0, 0)));
  }
  std::int64_t received = 0;
  for (const at::Tensor& part : outs) received += part.numel();
  const at::Tensor in = at::cat(ins), out = at::empty({received}, output.options());
  start(all_to_all_op(host, each_piece(host_outs), each_piece(host_ins), {output, input}));
  start(link_op(
      [all = all_, out, in, out_sizes = sizes_in_bytes(outs), in_sizes = sizes_in_bytes(ins)]() mutable {
        at::Tensor to = as_bytes(out), from = as_bytes(in);
        return all->alltoall_base(to, from, out_sizes, in_sizes);
      },
      [outs, out] {
        std::int64_t begin = 0;
        for (const at::Tensor& part : outs) {
          part.copy_(out.narrow(0, begin, part.numel()));
          begin += part.numel();
        }
      }));
  return work(::c10d::OpType::ALLTOALL_BASE);
}

WorkPtr HostsBackend::barrier(const ::c10d::BarrierOptions& /*options*/) {
  start(barrier_op(engine_->host()));
  then(link_op([rail = rail_] { return rail->barrier(); }));
  return work(::c10d::OpType::BARRIER);
}

}  // namespace tessera::comm
