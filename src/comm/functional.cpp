#include "tessera/comm/functional.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include "comm/group_impl.h"
#include "tessera/base/error.h"
#include "tessera/base/function_ref.h"
#include "tessera/comm/internal/linear.h"

namespace tessera::functional {

namespace {

using Splits = std::vector<std::int64_t>;

// What `compare` requires of the first dimension.
enum class Rows : std::uint8_t { may_lack, equal, one_part_for_each_rank, may_differ };

// Throws for an input that this rank cannot pass.
void check(const ProcessGroup& group, std::string_view call, const at::Tensor& tensor, Rows rows) {
  const auto refuse = [&](std::string_view found) {
    fail(ErrorCode::invalid_argument, "{}: the input {}", call, found);
  };
  if (!tensor.defined()) refuse("is undefined, expected a tensor");
  if (tensor.is_meta()) refuse("is on meta, expected a device with memory");
  if (tensor.layout() != at::kStrided) refuse("is not strided, expected a strided tensor");
  if (rows != Rows::may_lack && tensor.dim() == 0) refuse("has no dimension, expected at least one");
  if (rows == Rows::one_part_for_each_rank && tensor.size(0) % group.size() != 0) {
    refuse(fmt::format("has {} rows, expected a multiple of the {} ranks", tensor.size(0), group.size()));
  }
}

// Compares the ranks' calls, after further checks of this rank's. The collective may then start without a comparison of
// its own.
void compare(const ProcessGroup& group, std::string_view call, const at::Tensor& tensor, Rows rows,
             FunctionRef<void()> check_more = nullptr) {
  group.check_call(call, [&](CallArguments& arguments) {
    check(group, call, tensor, rows);
    if (check_more) check_more();
    comm::add_tensor(arguments, tensor).add_list("sizes", tensor.sizes().slice(rows == Rows::may_differ ? 1 : 0));
  });
}

// Refuses an undefined input, which autograd would before the ranks compare.
void require_defined(const ProcessGroup& group, std::string_view call, const at::Tensor& input) {
  if (!input.defined()) compare(group, call, input, Rows::may_lack);
}

at::Tensor rows_like(const at::Tensor& tensor, std::int64_t rows) {
  std::vector<std::int64_t> sizes = tensor.sizes().vec();
  sizes[0] = rows;
  return at::empty(sizes, tensor.options().requires_grad(false));
}

// Returns a tensor whose elements are in memory as they are.
at::Tensor plain(const at::Tensor& tensor) { return tensor.resolve_conj().resolve_neg().contiguous(); }

at::Tensor gathered(const ProcessGroup& group, const at::Tensor& tensor) {
  compare(group, "functional::all_gather", tensor, Rows::equal);
  at::Tensor out = rows_like(tensor, tensor.size(0) * group.size());
  group.start_all_gather_into(out, plain(tensor)).wait();
  return out;
}

at::Tensor reduced_and_scattered(const ProcessGroup& group, const at::Tensor& tensor) {
  compare(group, "functional::reduce_scatter", tensor, Rows::one_part_for_each_rank);
  at::Tensor out = rows_like(tensor, tensor.size(0) / group.size());
  group.start_reduce_scatter_into(out, plain(tensor)).wait();
  return out;
}

at::Tensor summed(const ProcessGroup& group, const at::Tensor& tensor) {
  compare(group, "functional::all_reduce", tensor, Rows::may_lack);
  at::Tensor sum = tensor.clone(at::MemoryFormat::Contiguous);
  group.start_all_reduce(sum).wait();
  return sum;
}

at::Tensor exchanged(const ProcessGroup& group, const at::Tensor& tensor, const Splits& out_splits,
                     const Splits& in_splits) {
  constexpr std::string_view kCall = "functional::all_to_all";
  at::Tensor out;
  std::int64_t row = 1;
  compare(group, kCall, tensor, Rows::may_differ, [&] {
    for (const std::int64_t size : tensor.sizes().slice(1)) row *= size;
    const std::int64_t most = std::numeric_limits<std::int64_t>::max() / std::max<std::int64_t>(row, 1);
    for (const Splits& splits : {out_splits, in_splits}) {
      std::int64_t left = most;  // a sum of splits may overflow
      const auto takes = [&](std::int64_t split) { return split >= 0 && (left -= split) >= 0; };
      if (!std::all_of(splits.begin(), splits.end(), takes)) {
        fail(ErrorCode::invalid_argument, "{}: splits [{}], expected none below 0, and at most {} rows", kCall,
             fmt::join(splits, ", "), most);
      }
    }
    out = rows_like(tensor, std::accumulate(out_splits.begin(), out_splits.end(), std::int64_t{0}));
  });
  const auto elements = [row](Splits rows) {
    for (std::int64_t& count : rows) count *= row;
    return rows;
  };
  group.all_to_all(out, plain(tensor), elements(out_splits), elements(in_splits));
  return out;
}

}  // namespace

at::Tensor all_gather(const ProcessGroup& group, const at::Tensor& input) {
  require_defined(group, "functional::all_gather", input);
  return comm::linear(
      input, [&](const at::Tensor& x) { return gathered(group, x); },
      [group](const at::Tensor& gradient) { return reduce_scatter(group, gradient); });
}

at::Tensor reduce_scatter(const ProcessGroup& group, const at::Tensor& input) {
  require_defined(group, "functional::reduce_scatter", input);
  return comm::linear(
      input, [&](const at::Tensor& x) { return reduced_and_scattered(group, x); },
      [group](const at::Tensor& gradient) { return all_gather(group, gradient); });
}

at::Tensor all_reduce(const ProcessGroup& group, const at::Tensor& input) {
  require_defined(group, "functional::all_reduce", input);
  return comm::linear(
      input, [&](const at::Tensor& x) { return summed(group, x); },
      [group](const at::Tensor& gradient) { return all_reduce(group, gradient); });
}

std::vector<at::Tensor> all_reduce_coalesced(const ProcessGroup& group, std::span<const at::Tensor> inputs) {
  constexpr std::string_view kCall = "functional::all_reduce_coalesced";
  group.check_call(kCall, [&](CallArguments& arguments) {
    arguments.add("tensors", inputs.size());
    for (const at::Tensor& input : inputs) {
      check(group, kCall, input, Rows::may_lack);
      if (input.scalar_type() != inputs[0].scalar_type() || input.device() != inputs[0].device()) {
        fail(ErrorCode::invalid_argument, "{}: inputs of {} on {} and of {} on {}, expected one dtype and device",
             kCall, c10::toString(inputs[0].scalar_type()), inputs[0].device().str(),
             c10::toString(input.scalar_type()), input.device().str());
      }
      comm::add_tensor(arguments, input).add_list("sizes", input.sizes());
    }
  });
  std::vector<at::Tensor> parts;
  for (const at::Tensor& input : inputs) parts.push_back(input.reshape({-1}));
  if (parts.empty()) return parts;
  const auto sum = [&](const at::Tensor& x) {
    at::Tensor all = x.clone();
    group.start_all_reduce(all).wait();
    return all;
  };
  const at::Tensor all =
      comm::linear(at::cat(parts), sum, [group](const at::Tensor& gradient) { return all_reduce(group, gradient); });
  std::int64_t begin = 0;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const std::int64_t elements = inputs[i].numel();
    parts[i] = all.narrow(0, begin, elements).reshape(inputs[i].sizes());
    begin += elements;
  }
  return parts;
}

at::Tensor all_to_all(const ProcessGroup& group, const at::Tensor& input, std::span<const std::int64_t> out_splits,
                      std::span<const std::int64_t> in_splits) {
  const Splits out(out_splits.begin(), out_splits.end()), in(in_splits.begin(), in_splits.end());
  return comm::linear(
      input, [&](const at::Tensor& x) { return exchanged(group, x, out, in); },
      [group, out, in](const at::Tensor& gradient) { return all_to_all(group, gradient, in, out); });
}

at::Tensor sum_gradients(const ProcessGroup& group, const at::Tensor& input) {
  const auto sum = [group](const at::Tensor& gradient) {
    // The sum is equal on all ranks, and so is its gradient.
    return comm::linear(
        gradient, [&](const at::Tensor& x) { return summed(group, x); },
        [group](const at::Tensor& x) { return sum_gradients(group, x); });
  };
  return comm::linear(
      input, [](const at::Tensor& x) { return x.view_as(x); }, sum);
}

}  // namespace tessera::functional
