// Collectives on tensors. If a backend lacks a collective, others of its collectives replace it, only in this file:
//   elements are moved as bytes, so that a backend needs to support no dtype
//   gather and scatter are an all-to-all in which most parts are empty
//   reduce_scatter_into is an all-to-all and a local sum
//   all_reduce of a dtype that a backend cannot add is an all-gather and a local sum
//   what has more elements than a backend counts is carried by Gloo

#include <ATen/ops/empty.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "comm/group_impl.h"
#include "tessera/base/function_ref.h"
#include "tessera/base/internal/timeout.h"

namespace tessera {

namespace {

using Splits = std::vector<std::int64_t>;

// Returns the same memory as bytes. It shares the storage, so that a backend on streams can tell the allocator of its
// use.
at::Tensor bytes_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return {};
  const auto element_size = static_cast<std::int64_t>(tensor.element_size());
  return at::empty({0}, at::TensorOptions().dtype(at::kByte).device(tensor.device()))
      .set_(tensor.storage(), tensor.storage_offset() * element_size, {tensor.numel() * element_size});
}

// Returns whether the backend reduces this dtype itself. Gloo adds half only since 2.8 and only if it was built with
// LibTorch's dtypes. c10d passes int8 to MPI as characters, which not every MPI adds.
bool reduces(const comm::Transport& transport, at::ScalarType dtype, ReduceOp op) {
  if (transport.is_complete) return true;
  const bool is_on_stream = transport.is_on_stream;
  switch (dtype) {
    case at::kFloat:
    case at::kDouble:
    case at::kByte:
    case at::kInt:
    case at::kLong:
      return is_on_stream || op != ReduceOp::average;
    case at::kChar:
      return is_on_stream || (transport.name == "gloo" && op != ReduceOp::average);
    case at::kHalf:
    case at::kBFloat16:
      return is_on_stream;
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

class Checks {
 public:
  Checks(ProcessGroup::Impl& group, std::string_view name) : group_(group), name_(name) {}

  template <typename... Args>
  [[noreturn]] void refuse(fmt::format_string<Args...> format, Args&&... args) const {
    fail(ErrorCode::invalid_argument, "{}: {}", group_.where(name_), fmt::format(format, std::forward<Args>(args)...));
  }
  void check(const at::Tensor& tensor, std::string_view what) const {
    if (!tensor.defined()) refuse("{} is undefined, expected a tensor", what);
    if (tensor.is_meta()) refuse("{} is on meta, expected a device with memory", what);
    if (tensor.layout() != at::kStrided || !tensor.is_contiguous())
      refuse("{} is not contiguous, expected a contiguous tensor", what);
    if (tensor.is_conj() || tensor.is_neg())
      refuse("{} is a conjugated or negated view, expected a plain tensor, as resolve_conj() returns", what);
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
  // Checks that `full` has one `part` for each rank, and that they overlap at most where `part` is that of this rank:
  // other ranks' parts of `full` are read or written while `part` is.
  void check_parts(const at::Tensor& full, std::string_view name, const at::Tensor& part) const {
    if (full.numel() != part.numel() * group_.size()) {
      refuse("{} has {} elements, expected {} x {}, one part for each rank", name, full.numel(), group_.size(),
             part.numel());
    }
    const std::uintptr_t own = begin_of(full) + static_cast<std::size_t>(group_.rank) * part.nbytes();
    if (overlap(full, part) && begin_of(part) != own)
      refuse("out and in overlap, expected memory of their own, or this rank's part of {}", name);
  }
  // Checks that no part of `out` may be received before the elements there were sent.
  void check_apart(const at::Tensor& out, const at::Tensor& in) const {
    if (overlap(out, in)) refuse("out and in overlap, expected memory of their own");
  }
  void check_reduction(const at::Tensor& tensor, ReduceOp op) const {
    const at::ScalarType dtype = tensor.scalar_type();
    if (std::string_view(c10::toString(dtype)).starts_with("Float8") || c10::isQIntType(dtype))
      refuse("reduction of {}, expected a dtype that can be added", c10::toString(dtype));
    if (op == ReduceOp::average && !tensor.is_floating_point() && !tensor.is_complex()) {
      refuse("average of {}, expected a floating-point dtype", c10::toString(dtype));
    }
  }

  // Checks that there is one split for each rank and that they add up to the tensor's elements.
  void check_splits(std::span<const std::int64_t> splits, const at::Tensor& tensor, std::string_view what) const {
    std::int64_t left = tensor.numel();  // a sum of splits may overflow
    const auto takes = [&](std::int64_t split) { return split >= 0 && (left -= split) >= 0; };
    const bool fits = splits.size() == static_cast<std::size_t>(group_.size()) &&
                      std::all_of(splits.begin(), splits.end(), takes) && left == 0;
    if (!fits) {
      refuse("the splits of {} are [{}], expected {} that add up to {}", what, fmt::join(splits, ", "), group_.size(),
             tensor.numel());
    }
  }

  // Checks that the backend can count the bytes of one call. Ranks have different numbers of them, so no other backend
  // can replace it on all.
  void check_count(const at::Tensor& tensor, std::string_view what) const {
    const comm::Transport& transport = group_.transports.of(tensor);
    const auto bytes = static_cast<std::int64_t>(tensor.nbytes());
    if (bytes > transport.most_elements) {
      refuse("{} has {} bytes, expected at most {} with {}: use several calls", what, bytes, transport.most_elements,
             transport.name);
    }
  }

 private:
  static std::uintptr_t begin_of(const at::Tensor& tensor) {
    return reinterpret_cast<std::uintptr_t>(tensor.data_ptr());
  }
  static bool overlap(const at::Tensor& a, const at::Tensor& b) {
    if (a.numel() == 0 || b.numel() == 0) return false;
    return begin_of(a) < begin_of(b) + b.nbytes() && begin_of(b) < begin_of(a) + a.nbytes();
  }

  ProcessGroup::Impl& group_;
  std::string_view name_;
};

void check_all_reduce(ProcessGroup::Impl& group, const at::Tensor& tensor, ReduceOp op) {
  const Checks checks(group, "all_reduce");
  checks.check(tensor, "tensor");
  checks.check_reduction(tensor, op);
}

void check_all_gather(ProcessGroup::Impl& group, const at::Tensor& out, const at::Tensor& in) {
  const Checks checks(group, "all_gather_into");
  checks.check(out, "out");
  checks.check(in, "in");
  checks.check_alike(out, in);
  checks.check_parts(out, "out", in);
}

void check_reduce_scatter(ProcessGroup::Impl& group, const at::Tensor& out, const at::Tensor& in, ReduceOp op) {
  const Checks checks(group, "reduce_scatter_into");
  checks.check(out, "out");
  checks.check(in, "in");
  checks.check_alike(out, in);
  checks.check_parts(in, "in", out);
  checks.check_reduction(in, op);
}

void check_all_to_all(ProcessGroup::Impl& group, const at::Tensor& out, const at::Tensor& in,
                      std::span<const std::int64_t> out_splits, std::span<const std::int64_t> in_splits) {
  const Checks checks(group, "all_to_all");
  checks.check(out, "out");
  checks.check(in, "in");
  checks.check_alike(out, in);
  checks.check_splits(out_splits, out, "out");
  checks.check_splits(in_splits, in, "in");
  checks.check_count(out, "out");
  checks.check_count(in, "in");
  checks.check_apart(out, in);
}

using StoredStart = std::function<comm::WorkPtr(comm::Backend& backend)>;

StoredStart all_to_all(const at::Tensor& out, const at::Tensor& in, Splits out_splits, Splits in_splits) {
  return [to = out, from = in, to_splits = std::move(out_splits), from_splits = std::move(in_splits)](
             comm::Backend& backend) mutable { return backend.alltoall_base(to, from, to_splits, from_splits); };
}

StoredStart all_gather(const ProcessGroup::Impl& group, const comm::Transport& transport, const at::Tensor& out,
                       const at::Tensor& in) {
  if (transport.is_on_stream || transport.is_complete) {
    return [to = out, from = in](comm::Backend& backend) mutable { return backend._allgather_base(to, from); };
  }
  const std::int64_t part = in.numel();
  std::vector<std::vector<at::Tensor>> outs(1);
  for (int r = 0; r < group.size(); ++r) outs[0].push_back(out.narrow(0, r * part, part));
  return [outs, ins = std::vector<at::Tensor>{in}](comm::Backend& backend) mutable {
    return backend.allgather(outs, ins);
  };
}

Splits in_bytes(std::span<const std::int64_t> splits, const at::Tensor& tensor) {
  Splits bytes;
  for (const std::int64_t split : splits) bytes.push_back(split * static_cast<std::int64_t>(tensor.element_size()));
  return bytes;
}

void copy_elements(const at::Tensor& out, const at::Tensor& in) {
  out.detach().view({-1}).copy_(in.detach().view({-1}));
}

// Runs `check` on this rank alone. If it throws, the others, which may wait for this rank, are told.
void check_alone(ProcessGroup::Impl& group, std::string_view name, FunctionRef<void()> check) {
  try {
    check();
  } catch (const Error& error) {
    if (!group.is_alone())
      group.liveness->report(fmt::format("rank {} refused {}: {}",
                                         group.world_ranks[static_cast<std::size_t>(group.rank)], name, error.what()));
    throw;
  }
}

// Returns what carries `elements` of `tensor`. Their number is equal on all ranks.
const comm::Transport& carrier_of(ProcessGroup::Impl& group, const at::Tensor& tensor, std::int64_t elements) {
  const comm::Transport& transport = group.carrier(tensor);
  return elements <= transport.most_elements ? transport : group.transports.control;
}

std::int64_t byte_count(const at::Tensor& tensor) { return static_cast<std::int64_t>(tensor.nbytes()); }

PendingCollective start_reduction(const comm::GroupPtr& group, const at::Tensor& tensor, ReduceOp op) {
  if (group->is_alone() || tensor.numel() == 0) return {};
  const comm::Transport& transport = carrier_of(*group, tensor, tensor.numel());
  const auto begin = [&](ReduceOp reduction, std::function<void()> finish) {
    ::c10d::AllreduceOptions options;
    options.reduceOp = c10d_op(reduction);
    std::vector<at::Tensor> tensors = {tensor.detach()};
    return ProcessGroup::Impl::begin(
        group, "all_reduce", transport, tensor.device(),
        [&](comm::Backend& backend) { return backend.allreduce(tensors, options); }, std::move(finish));
  };
  if (reduces(transport, tensor.scalar_type(), op)) return begin(op, {});
  if (op == ReduceOp::average && reduces(transport, tensor.scalar_type(), ReduceOp::sum)) {
    return begin(ReduceOp::sum, [tensor, ranks = group->size()] { tensor.detach().div_(ranks); });
  }
  const at::Tensor parts = at::empty({group->size(), tensor.numel()}, tensor.options().requires_grad(false));
  const comm::Transport& carrier = carrier_of(*group, tensor, byte_count(tensor));
  return ProcessGroup::Impl::begin(group, "all_reduce", carrier, tensor.device(),
                                   all_gather(*group, carrier, bytes_of(parts), bytes_of(tensor)),
                                   [tensor, parts, op] { reduce_rows(tensor, parts, op); });
}

PendingCollective start_reduce_scatter(const comm::GroupPtr& group, const at::Tensor& out, const at::Tensor& in,
                                       ReduceOp op) {
  constexpr std::string_view kName = "reduce_scatter_into";
  if (group->is_alone()) copy_elements(out, in);
  if (group->is_alone() || out.numel() == 0) return {};
  const comm::Transport& transport = group->carrier(in);
  if ((transport.is_on_stream || transport.is_complete) && reduces(transport, in.scalar_type(), op)) {
    ::c10d::ReduceScatterOptions options;
    options.reduceOp = c10d_op(op);
    at::Tensor to = out.detach(), from = in.detach();
    return ProcessGroup::Impl::begin(group, kName, transport, in.device(), [&](comm::Backend& backend) {
      return backend._reduce_scatter_base(to, from, options);
    });
  }
  const at::Tensor parts = at::empty({group->size(), out.numel()}, out.options().requires_grad(false));
  const Splits splits(static_cast<std::size_t>(group->size()), byte_count(out));
  return ProcessGroup::Impl::begin(group, kName, carrier_of(*group, in, byte_count(in)), in.device(),
                                   all_to_all(bytes_of(parts), bytes_of(in), splits, splits),
                                   [out, parts, op] { reduce_rows(out, parts, op); });
}

}  // namespace

CallArguments& comm::add_tensor(CallArguments& arguments, const at::Tensor& tensor) {
  const std::string device_type = c10::DeviceTypeName(tensor.device().type(), /*lower_case=*/true);
  return arguments.add("device type", device_type).add("dtype", c10::toString(tensor.scalar_type()));
}

void comm::check_reduction(ProcessGroup::Impl& group, std::string_view name, const at::Tensor& tensor, ReduceOp op) {
  check_alone(group, name, [&] { Checks(group, name).check_reduction(tensor, op); });
}

PendingCollective comm::start_all_gather(const GroupPtr& group, const Transport& transport, std::string_view name,
                                         const at::Tensor& out, const at::Tensor& in, bool is_counted) {
  if (group->is_alone()) copy_elements(out, in);
  if (group->is_alone() || in.numel() == 0) return {};
  return ProcessGroup::Impl::begin(group, name, transport, in.device(),
                                   all_gather(*group, transport, bytes_of(out), bytes_of(in)), {}, is_counted);
}

PendingCollective comm::start_all_to_all(const GroupPtr& group, const Transport& transport, std::string_view name,
                                         const at::Tensor& out, const at::Tensor& in,
                                         std::span<const std::int64_t> out_splits,
                                         std::span<const std::int64_t> in_splits) {
  if (group->is_alone()) {
    copy_elements(out, in);
    return {};
  }
  return ProcessGroup::Impl::begin(
      group, name, transport, in.device(),
      all_to_all(bytes_of(out), bytes_of(in), in_bytes(out_splits, out), in_bytes(in_splits, in)));
}

void comm::broadcast(const GroupPtr& group, const Transport& transport, std::string_view name, const at::Tensor& tensor,
                     int root) {
  if (group->is_alone() || tensor.numel() == 0) return;
  ::c10d::BroadcastOptions options;
  options.rootRank = root;
  std::vector<at::Tensor> tensors = {bytes_of(tensor)};
  group->run(name, transport, tensor.device(), [&](Backend& backend) { return backend.broadcast(tensors, options); });
}

// --- public: they compare the ranks' calls first

void ProcessGroup::broadcast(const at::Tensor& tensor, int root) const {
  check_call("broadcast", [&](CallArguments& arguments) {
    const Checks checks(*impl_, "broadcast");
    checks.check(tensor, "tensor");
    checks.check_root(root);
    comm::add_tensor(arguments.add("root", root), tensor).add("elements", tensor.numel());
  });
  comm::broadcast(impl_, carrier_of(*impl_, tensor, byte_count(tensor)), "broadcast", tensor, root);
}

void ProcessGroup::all_reduce(const at::Tensor& tensor, ReduceOp op) const {
  check_call("all_reduce", [&](CallArguments& arguments) {
    check_all_reduce(*impl_, tensor, op);
    comm::add_tensor(arguments.add("op", static_cast<int>(op)), tensor).add("elements", tensor.numel());
  });
  start_reduction(impl_, tensor, op).wait();
}

PendingCollective ProcessGroup::start_all_reduce(const at::Tensor& tensor, ReduceOp op) const {
  check_alone(*impl_, "all_reduce", [&] { check_all_reduce(*impl_, tensor, op); });
  return start_reduction(impl_, tensor, op);
}

void ProcessGroup::all_gather_into(const at::Tensor& out, const at::Tensor& in) const {
  check_call("all_gather_into", [&](CallArguments& arguments) {
    check_all_gather(*impl_, out, in);
    comm::add_tensor(arguments, in).add("elements of in", in.numel());
  });
  comm::start_all_gather(impl_, carrier_of(*impl_, in, byte_count(out)), "all_gather_into", out, in).wait();
}

PendingCollective ProcessGroup::start_all_gather_into(const at::Tensor& out, const at::Tensor& in) const {
  check_alone(*impl_, "all_gather_into", [&] { check_all_gather(*impl_, out, in); });
  return comm::start_all_gather(impl_, carrier_of(*impl_, in, byte_count(out)), "all_gather_into", out, in);
}

void ProcessGroup::reduce_scatter_into(const at::Tensor& out, const at::Tensor& in, ReduceOp op) const {
  check_call("reduce_scatter_into", [&](CallArguments& arguments) {
    check_reduce_scatter(*impl_, out, in, op);
    comm::add_tensor(arguments.add("op", static_cast<int>(op)), out).add("elements of out", out.numel());
  });
  start_reduce_scatter(impl_, out, in, op).wait();
}

PendingCollective ProcessGroup::start_reduce_scatter_into(const at::Tensor& out, const at::Tensor& in,
                                                          ReduceOp op) const {
  check_alone(*impl_, "reduce_scatter_into", [&] { check_reduce_scatter(*impl_, out, in, op); });
  return start_reduce_scatter(impl_, out, in, op);
}

void ProcessGroup::all_to_all(const at::Tensor& out, const at::Tensor& in, std::span<const std::int64_t> out_splits,
                              std::span<const std::int64_t> in_splits) const {
  check_call("all_to_all", [&](CallArguments& arguments) {
    check_all_to_all(*impl_, out, in, out_splits, in_splits);
    comm::add_tensor(arguments, in);
  });
  // What each rank sends must be what the other expects.
  const at::Tensor sent = at::empty({size()}, at::kLong), announced = at::empty({size()}, at::kLong);
  std::copy(in_splits.begin(), in_splits.end(), sent.data_ptr<std::int64_t>());
  const Splits ones(static_cast<std::size_t>(size()), 1);
  comm::start_all_to_all(impl_, impl_->transports.control, "all_to_all", announced, sent, ones, ones).wait();
  check_call("all_to_all", [&](CallArguments&) {
    for (int r = 0; r < size(); ++r) {
      const std::int64_t comes = announced.data_ptr<std::int64_t>()[r],
                         expected = out_splits[static_cast<std::size_t>(r)];
      if (comes == expected) continue;
      fail(ErrorCode::invalid_argument, "{}: rank {} sends {} elements, expected {} as in out_splits",
           impl_->where("all_to_all"), r, comes, expected);
    }
  });
  comm::start_all_to_all(impl_, impl_->carrier(in), "all_to_all", out, in, out_splits, in_splits).wait();
}

PendingCollective ProcessGroup::start_all_to_all(const at::Tensor& out, const at::Tensor& in,
                                                 std::span<const std::int64_t> out_splits,
                                                 std::span<const std::int64_t> in_splits) const {
  check_alone(*impl_, "all_to_all", [&] { check_all_to_all(*impl_, out, in, out_splits, in_splits); });
  return comm::start_all_to_all(impl_, impl_->carrier(in), "all_to_all", out, in, out_splits, in_splits);
}

void ProcessGroup::gather(const at::Tensor& out, const at::Tensor& in, int root) const {
  check_call("gather", [&](CallArguments& arguments) {
    const Checks checks(*impl_, "gather");
    checks.check_root(root);
    checks.check(in, "in");
    if (root != rank() && out.defined()) checks.refuse("out is defined, expected it only on root {}", root);
    if (root == rank()) {
      checks.check(out, "out");
      checks.check_alike(out, in);
      checks.check_parts(out, "out", in);
    }
    comm::add_tensor(arguments.add("root", root), in).add("elements of in", in.numel());
  });
  const auto ranks = static_cast<std::size_t>(size());
  Splits out_splits(ranks, root == rank() ? in.numel() : 0), in_splits(ranks, 0);
  in_splits[static_cast<std::size_t>(root)] = in.numel();
  const at::Tensor to = root == rank() ? out : at::empty({0}, in.options());
  const comm::Transport& transport = carrier_of(*impl_, in, size() * byte_count(in));
  comm::start_all_to_all(impl_, transport, "gather", to, in, out_splits, in_splits).wait();
}

void ProcessGroup::scatter(const at::Tensor& out, const at::Tensor& in, int root) const {
  check_call("scatter", [&](CallArguments& arguments) {
    const Checks checks(*impl_, "scatter");
    checks.check_root(root);
    checks.check(out, "out");
    if (root != rank() && in.defined()) checks.refuse("in is defined, expected it only on root {}", root);
    if (root == rank()) {
      checks.check(in, "in");
      checks.check_alike(out, in);
      checks.check_parts(in, "in", out);
    }
    comm::add_tensor(arguments.add("root", root), out).add("elements of out", out.numel());
  });
  const auto ranks = static_cast<std::size_t>(size());
  Splits out_splits(ranks, 0), in_splits(ranks, root == rank() ? out.numel() : 0);
  out_splits[static_cast<std::size_t>(root)] = out.numel();
  const at::Tensor from = root == rank() ? in : at::empty({0}, out.options());
  const comm::Transport& transport = carrier_of(*impl_, out, size() * byte_count(out));
  comm::start_all_to_all(impl_, transport, "scatter", out, from, out_splits, in_splits).wait();
}

void ProcessGroup::barrier(std::optional<std::chrono::milliseconds> limit) const {
  check_alone(*impl_, "barrier", [&] {
    if (limit && limit->count() <= 0)
      Checks(*impl_, "barrier").refuse("timeout {} ms, expected more than 0", limit->count());
  });
  if (impl_->is_alone()) return;
  if (!limit) return check_call("barrier", [](CallArguments&) {});  // all ranks have called it when this returns
  ::c10d::BarrierOptions options;
  options.timeout = bounded(*limit);
  impl_->run(
      "barrier", impl_->transports.control, at::kCPU, [&](comm::Backend& backend) { return backend.barrier(options); },
      options.timeout);
}

}  // namespace tessera
