// Collectives on tensors. If a backend lacks a collective, others of its collectives replace it, only in this file:
//   elements are moved as bytes, so that a backend needs to support no dtype
//   gather and scatter are an all-to-all in which most parts are empty
//   reduce_scatter_into is an all-to-all and a local sum
//   all_reduce of a dtype that a backend cannot add is an all-gather and a local sum

#include <ATen/ops/from_blob.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <fmt/ranges.h>

#include <numeric>

#include "comm/group_impl.h"

namespace tessera {

namespace {

using Splits = std::vector<std::int64_t>;

// Returns the same memory as bytes and keeps `tensor` alive.
at::Tensor bytes_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return {};
  return at::from_blob(
      tensor.data_ptr(), {static_cast<std::int64_t>(tensor.nbytes())}, [tensor](void*) {},
      at::TensorOptions().dtype(at::kByte).device(tensor.device()));
}

// Returns whether the backend reduces this dtype itself. Gloo adds half only since 2.8 and only if it was built with
// LibTorch's dtypes.
bool reduces(const comm::Transport& transport, at::ScalarType dtype, ReduceOp op) {
  const bool nccl = transport.name == "nccl";
  switch (dtype) {
    case at::kFloat:
    case at::kDouble:
    case at::kChar:
    case at::kByte:
    case at::kInt:
    case at::kLong:
      return nccl || op != ReduceOp::average;
    case at::kHalf:
    case at::kBFloat16:
      return nccl;
    default:
      return false;
  }
}

::c10d::ReduceOp c10d_op(ReduceOp op) {
  using Type = ::c10d::ReduceOp::RedOpType;
  switch (op) {
    case ReduceOp::sum:
      return Type::SUM;
    case ReduceOp::average:
      return Type::AVG;
    case ReduceOp::product:
      return Type::PRODUCT;
    case ReduceOp::min:
      return Type::MIN;
    case ReduceOp::max:
      return Type::MAX;
  }
  return Type::UNUSED;
}

// Reduces `parts`, which has a row for each rank, to `out`, in the order of the ranks.
void reduce_rows(const at::Tensor& out, const at::Tensor& parts, ReduceOp op) {
  const at::Tensor rows = parts.detach();
  at::Tensor result = out.detach().view({-1});
  result.copy_(rows[0]);
  for (std::int64_t i = 1; i < rows.size(0); ++i) {
    switch (op) {
      case ReduceOp::sum:
      case ReduceOp::average:
        result.add_(rows[i]);
        break;
      case ReduceOp::product:
        result.mul_(rows[i]);
        break;
      case ReduceOp::min:
        at::minimum_out(result, result, rows[i]);
        break;
      case ReduceOp::max:
        at::maximum_out(result, result, rows[i]);
        break;
    }
  }
  if (op == ReduceOp::average) result.div_(rows.size(0));
}

class Collective {
 public:
  Collective(ProcessGroup::Impl& group, std::string_view name) : group_(group), name_(name) {}

  template <typename... Args>
  [[noreturn]] void refuse(fmt::format_string<Args...> format, Args&&... args) const {
    fail(ErrorCode::invalid_argument, "{}: {}", group_.where(name_), fmt::format(format, std::forward<Args>(args)...));
  }
  void check(const at::Tensor& tensor, std::string_view what) const {
    if (!tensor.defined()) refuse("{} is undefined, expected a tensor", what);
    if (tensor.is_meta()) refuse("{} is on meta, expected a device with memory", what);
    if (tensor.layout() != at::kStrided || !tensor.is_contiguous())
      refuse("{} is not contiguous, expected a contiguous tensor", what);
  }
  void check_root(int root) const {
    if (root < 0 || root >= group_.size()) refuse("root {}, expected 0 to {}", root, group_.size() - 1);
  }
  void check_alike(const at::Tensor& out, const at::Tensor& in) const {
    if (out.scalar_type() != in.scalar_type()) {
      refuse("out is of {}, in of {}, expected the same", c10::toString(out.scalar_type()),
             c10::toString(in.scalar_type()));
    }
    if (out.device() != in.device())
      refuse("out is on {}, in on {}, expected the same device", out.device().str(), in.device().str());
  }
  // Checks that `full` has one `part` for each rank.
  void check_parts(const at::Tensor& full, std::string_view name, const at::Tensor& part) const {
    if (full.numel() != part.numel() * group_.size()) {
      refuse("{} has {} elements, expected {} x {}, one part for each rank", name, full.numel(), group_.size(),
             part.numel());
    }
  }
  void check_reduction(const at::Tensor& tensor, ReduceOp op) const {
    if (op == ReduceOp::average && !tensor.is_floating_point() && !tensor.is_complex()) {
      refuse("average of {}, expected a floating-point dtype", c10::toString(tensor.scalar_type()));
    }
  }

  // Checks that there is one split for each rank and that they add up to the tensor's elements.
  void check_splits(std::span<const std::int64_t> splits, const at::Tensor& tensor, std::string_view what) const {
    const bool fits = splits.size() == static_cast<std::size_t>(group_.size()) &&
                      std::all_of(splits.begin(), splits.end(), [](std::int64_t split) { return split >= 0; }) &&
                      std::accumulate(splits.begin(), splits.end(), std::int64_t{0}) == tensor.numel();
    if (!fits) {
      refuse("the splits of {} are [{}], expected {} that add up to {}", what, fmt::join(splits, ", "), group_.size(),
             tensor.numel());
    }
  }

  using Start = ProcessGroup::Impl::Start;
  static Start all_to_all(const at::Tensor& out, const at::Tensor& in, Splits out_splits, Splits in_splits) {
    return [to = out, from = in, to_splits = std::move(out_splits), from_splits = std::move(in_splits)](
               comm::Backend& backend) mutable { return backend.alltoall_base(to, from, to_splits, from_splits); };
  }
  Start all_gather(const at::Tensor& out, const at::Tensor& in) const {
    const std::int64_t part = in.numel();
    std::vector<std::vector<at::Tensor>> outs(1);
    for (int r = 0; r < group_.size(); ++r) outs[0].push_back(out.narrow(0, r * part, part));
    return [outs, ins = std::vector<at::Tensor>{in}](comm::Backend& backend) mutable {
      return backend.allgather(outs, ins);
    };
  }

 private:
  ProcessGroup::Impl& group_;
  std::string_view name_;
};

Splits in_bytes(std::span<const std::int64_t> splits, const at::Tensor& tensor) {
  Splits bytes;
  for (const std::int64_t split : splits) bytes.push_back(split * static_cast<std::int64_t>(tensor.element_size()));
  return bytes;
}

void copy_elements(const at::Tensor& out, const at::Tensor& in) {
  out.detach().view({-1}).copy_(in.detach().view({-1}));
}

}  // namespace

void ProcessGroup::broadcast(const at::Tensor& tensor, int root) const {
  const Collective call(*impl_, "broadcast");
  call.check(tensor, "tensor");
  call.check_root(root);
  if (impl_->is_alone() || tensor.numel() == 0) return;
  ::c10d::BroadcastOptions options;
  options.rootRank = root;
  std::vector<at::Tensor> tensors = {bytes_of(tensor)};
  impl_->run("broadcast", tensor.device(), [&](comm::Backend& backend) { return backend.broadcast(tensors, options); });
}

void ProcessGroup::all_reduce(const at::Tensor& tensor, ReduceOp op) const { start_all_reduce(tensor, op).wait(); }

PendingCollective ProcessGroup::start_all_reduce(const at::Tensor& tensor, ReduceOp op) const {
  const Collective call(*impl_, "all_reduce");
  call.check(tensor, "tensor");
  call.check_reduction(tensor, op);
  if (impl_->is_alone() || tensor.numel() == 0) return {};
  const comm::Transport& transport = impl_->transports.of(tensor.device());
  const auto begin = [&](ReduceOp reduction, std::function<void()> finish) {
    ::c10d::AllreduceOptions options;
    options.reduceOp = c10d_op(reduction);
    std::vector<at::Tensor> tensors = {tensor.detach()};
    return Impl::begin(
        impl_, "all_reduce", tensor.device(),
        [&](comm::Backend& backend) { return backend.allreduce(tensors, options); }, std::move(finish));
  };
  if (reduces(transport, tensor.scalar_type(), op)) return begin(op, {});
  if (op == ReduceOp::average && reduces(transport, tensor.scalar_type(), ReduceOp::sum)) {
    return begin(ReduceOp::sum, [tensor, ranks = size()] { tensor.detach().div_(ranks); });
  }
  const at::Tensor parts = at::empty({size(), tensor.numel()}, tensor.options().requires_grad(false));
  return Impl::begin(impl_, "all_reduce", tensor.device(), call.all_gather(bytes_of(parts), bytes_of(tensor)),
                     [tensor, parts, op] { reduce_rows(tensor, parts, op); });
}

void ProcessGroup::all_gather_into(const at::Tensor& out, const at::Tensor& in) const {
  start_all_gather_into(out, in).wait();
}

PendingCollective ProcessGroup::start_all_gather_into(const at::Tensor& out, const at::Tensor& in) const {
  const Collective call(*impl_, "all_gather_into");
  call.check(out, "out");
  call.check(in, "in");
  call.check_alike(out, in);
  call.check_parts(out, "out", in);
  if (impl_->is_alone()) copy_elements(out, in);
  if (impl_->is_alone() || in.numel() == 0) return {};
  return Impl::begin(impl_, "all_gather_into", in.device(), call.all_gather(bytes_of(out), bytes_of(in)));
}

void ProcessGroup::reduce_scatter_into(const at::Tensor& out, const at::Tensor& in, ReduceOp op) const {
  start_reduce_scatter_into(out, in, op).wait();
}

PendingCollective ProcessGroup::start_reduce_scatter_into(const at::Tensor& out, const at::Tensor& in,
                                                          ReduceOp op) const {
  const Collective call(*impl_, "reduce_scatter_into");
  call.check(out, "out");
  call.check(in, "in");
  call.check_alike(out, in);
  call.check_parts(in, "in", out);
  call.check_reduction(in, op);
  if (impl_->is_alone()) copy_elements(out, in);
  if (impl_->is_alone() || out.numel() == 0) return {};
  const comm::Transport& transport = impl_->transports.of(in.device());
  if (transport.name == "nccl" && reduces(transport, in.scalar_type(), op)) {
    ::c10d::ReduceScatterOptions options;
    options.reduceOp = c10d_op(op);
    at::Tensor to = out.detach(), from = in.detach();
    return Impl::begin(impl_, "reduce_scatter_into", in.device(),
                       [&](comm::Backend& backend) { return backend._reduce_scatter_base(to, from, options); });
  }
  const at::Tensor parts = at::empty({size(), out.numel()}, out.options().requires_grad(false));
  const Splits splits(static_cast<std::size_t>(size()), static_cast<std::int64_t>(out.nbytes()));
  return Impl::begin(impl_, "reduce_scatter_into", in.device(),
                     Collective::all_to_all(bytes_of(parts), bytes_of(in), splits, splits),
                     [out, parts, op] { reduce_rows(out, parts, op); });
}

void ProcessGroup::all_to_all(const at::Tensor& out, const at::Tensor& in, std::span<const std::int64_t> out_splits,
                              std::span<const std::int64_t> in_splits) const {
  start_all_to_all(out, in, out_splits, in_splits).wait();
}

PendingCollective ProcessGroup::start_all_to_all(const at::Tensor& out, const at::Tensor& in,
                                                 std::span<const std::int64_t> out_splits,
                                                 std::span<const std::int64_t> in_splits) const {
  const Collective call(*impl_, "all_to_all");
  call.check(out, "out");
  call.check(in, "in");
  call.check_alike(out, in);
  call.check_splits(out_splits, out, "out");
  call.check_splits(in_splits, in, "in");
  if (impl_->is_alone()) {
    copy_elements(out, in);
    return {};
  }
  return Impl::begin(
      impl_, "all_to_all", in.device(),
      Collective::all_to_all(bytes_of(out), bytes_of(in), in_bytes(out_splits, out), in_bytes(in_splits, in)));
}

void ProcessGroup::gather(const at::Tensor& out, const at::Tensor& in, int root) const {
  const Collective call(*impl_, "gather");
  call.check_root(root);
  call.check(in, "in");
  if (root != rank() && out.defined()) call.refuse("out is defined, expected it only on root {}", root);
  if (root == rank()) {
    call.check(out, "out");
    call.check_alike(out, in);
    call.check_parts(out, "out", in);
  }
  if (impl_->is_alone()) return copy_elements(out, in);
  const auto ranks = static_cast<std::size_t>(size());
  const auto part = static_cast<std::int64_t>(in.nbytes());
  Splits out_splits(ranks, root == rank() ? part : 0), in_splits(ranks, 0);
  in_splits[static_cast<std::size_t>(root)] = part;
  impl_->run("gather", in.device(),
             Collective::all_to_all(bytes_of(root == rank() ? out : at::empty({0}, in.options())), bytes_of(in),
                                    out_splits, in_splits));
}

void ProcessGroup::scatter(const at::Tensor& out, const at::Tensor& in, int root) const {
  const Collective call(*impl_, "scatter");
  call.check_root(root);
  call.check(out, "out");
  if (root != rank() && in.defined()) call.refuse("in is defined, expected it only on root {}", root);
  if (root == rank()) {
    call.check(in, "in");
    call.check_alike(out, in);
    call.check_parts(in, "in", out);
  }
  if (impl_->is_alone()) return copy_elements(out, in);
  const auto ranks = static_cast<std::size_t>(size());
  const auto part = static_cast<std::int64_t>(out.nbytes());
  Splits out_splits(ranks, 0), in_splits(ranks, root == rank() ? part : 0);
  out_splits[static_cast<std::size_t>(root)] = part;
  impl_->run("scatter", out.device(),
             Collective::all_to_all(bytes_of(out), bytes_of(root == rank() ? in : at::empty({0}, out.options())),
                                    out_splits, in_splits));
}

void ProcessGroup::barrier(std::optional<std::chrono::milliseconds> limit) const {
  if (impl_->is_alone()) return;
  ::c10d::BarrierOptions options;
  options.timeout = limit.value_or(timeout());
  impl_->run(
      "barrier", at::kCPU, [&](comm::Backend& backend) { return backend.barrier(options); }, limit.value_or(timeout()));
}

}  // namespace tessera
