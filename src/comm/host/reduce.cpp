#include "comm/host/reduce.h"

#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/mul.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>

namespace tessera::comm {

void reduce_elements(at::ScalarType dtype, ReduceOp op, void* out, std::span<const void* const> sources,
                     std::int64_t numel) {
  const c10::impl::ExcludeDispatchKeyGuard no_autograd(c10::autograd_dispatch_keyset);
  const auto tensor_at = [&](const void* data) {
    return at::from_blob(const_cast<void*>(data), {numel}, at::TensorOptions().dtype(dtype));
  };
  at::Tensor result = tensor_at(out);
  // If `out` is the third source or a later one, the first sum must not replace it.
  const auto own = std::find(sources.begin(), sources.end(), out);
  at::Tensor kept;
  if (own != sources.end() && own - sources.begin() > 1) kept = result.clone();
  const auto source = [&](std::size_t i) { return sources[i] == out && kept.defined() ? kept : tensor_at(sources[i]); };
  at::Tensor so_far = source(0);
  for (std::size_t i = 1; i < sources.size(); ++i) {
    switch (op) {
      case ReduceOp::sum:
      case ReduceOp::average:
        at::add_out(result, so_far, source(i));
        break;
      case ReduceOp::product:
        at::mul_out(result, so_far, source(i));
        break;
      case ReduceOp::min:
        at::minimum_out(result, so_far, source(i));
        break;
      case ReduceOp::max:
        at::maximum_out(result, so_far, source(i));
        break;
    }
    so_far = result;
  }
  if (op == ReduceOp::average) result.div_(static_cast<std::int64_t>(sources.size()));
}

}  // namespace tessera::comm
