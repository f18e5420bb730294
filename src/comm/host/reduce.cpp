#include "comm/host/reduce.h"

#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/mul.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <array>

namespace tessera::comm {

namespace {

// The sum, or average, in one pass.
template <typename T>
[[gnu::always_inline]] inline void sum_all(T* out, std::span<const void* const> sources, std::int64_t numel,
                                           bool is_averaged) {
  constexpr std::int64_t kBlock = 256;  // in registers and the first cache
  const auto ranks = static_cast<T>(sources.size());
  std::array<T, kBlock> sums;
  for (std::int64_t begin = 0; begin < numel; begin += kBlock) {
    const std::int64_t count = std::min(kBlock, numel - begin);
    const auto* const first = static_cast<const T*>(sources[0]) + begin;
    const auto* const second = static_cast<const T*>(sources[1]) + begin;
    for (std::int64_t i = 0; i < count; ++i) sums[static_cast<std::size_t>(i)] = first[i] + second[i];
    for (std::size_t r = 2; r < sources.size(); ++r) {
      const auto* const next = static_cast<const T*>(sources[r]) + begin;
      for (std::int64_t i = 0; i < count; ++i) sums[static_cast<std::size_t>(i)] += next[i];
    }
    if (is_averaged) {
      for (std::int64_t i = 0; i < count; ++i) out[begin + i] = sums[static_cast<std::size_t>(i)] / ranks;
    } else {
      for (std::int64_t i = 0; i < count; ++i) out[begin + i] = sums[static_cast<std::size_t>(i)];
    }
  }
}

#if defined(__x86_64__)
// The same with vectors of 32 bytes.
template <typename T>
[[gnu::target("avx2")]] void sum_by_avx2(T* out, std::span<const void* const> sources, std::int64_t numel,
                                         bool is_averaged) {
  sum_all(out, sources, numel, is_averaged);
}
#endif

template <typename T>
void sum(T* out, std::span<const void* const> sources, std::int64_t numel, bool is_averaged) {
#if defined(__x86_64__)
  static const bool has_avx2 = __builtin_cpu_supports("avx2");
  if (has_avx2) return sum_by_avx2(out, sources, numel, is_averaged);
#endif
  sum_all(out, sources, numel, is_averaged);
}

}  // namespace

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

void reduce_elements(at::ScalarType dtype, ReduceOp op, void* out, std::span<const void* const> sources,
                     std::int64_t numel) {
  const bool is_average = op == ReduceOp::average;
  if (op == ReduceOp::sum || is_average) {
    if (dtype == at::kFloat) return sum(static_cast<float*>(out), sources, numel, is_average);
    if (dtype == at::kDouble) return sum(static_cast<double*>(out), sources, numel, is_average);
  }
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
  if (is_average) result.div_(static_cast<std::int64_t>(sources.size()));
}

}  // namespace tessera::comm
