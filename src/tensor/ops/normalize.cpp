// Ops that normalize over dimensions, and communicate if such a dimension is sharded; and matrix products.

#include <ATen/TensorOperators.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/full.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/softmax.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <span>
#include <string_view>
#include <utility>

#include "tensor/ops/built_in.h"
#include "tensor/ops/chunks.h"
#include "tessera/base/error.h"
#include "tessera/comm/functional.h"
#include "tessera/tensor/ops.h"

namespace tessera::ops {

namespace {

// Subtracts the maximum over all ranks, so that no exponential overflows.
at::Tensor softmax_over_ranks(const at::Tensor& input, std::int64_t dim, const ProcessGroup& group) {
  const at::Tensor local = widened(input);
  std::vector<std::int64_t> sizes = local.sizes().vec();
  sizes[static_cast<std::size_t>(dim)] = 1;
  const at::Tensor greatest = local.size(dim) == 0 ? at::full(sizes, -std::numeric_limits<double>::infinity(),
                                                              local.options().requires_grad(false))
                                                   : at::amax(local.detach(), {dim}, true);
  group.all_reduce(greatest, ReduceOp::max);
  const at::Tensor exponentials = (local - greatest).exp();
  return narrowed_as(input, exponentials / functional::all_reduce(group, exponentials.sum({dim}, true)));
}

// Returns a replicated parameter whose gradient is summed over the ranks.
at::Tensor replicated_parameter(const ProcessGroup& group, const at::Tensor& parameter) {
  return parameter.defined() ? functional::sum_gradients(group, parameter) : parameter;
}

void check_layer_norm(const ShardedTensor& input, const std::vector<std::int64_t>& shape,
                      const LayerNormOptions& options) {
  const ShardedTensor::Sizes& size = input.size();
  const bool fits =
      !shape.empty() && shape.size() <= size.size() && std::equal(shape.rbegin(), shape.rend(), size.rbegin());
  if (!fits) {
    fail(ErrorCode::invalid_argument, "op 'layer_norm' of {} over {}: expected the sizes of its last dimensions",
         describe(input), shape_to_string(shape));
  }
  for (const at::Tensor& parameter : {options.weight, options.bias}) {
    if (parameter.defined() && parameter.sizes() != at::IntArrayRef(shape)) {
      fail(ErrorCode::invalid_argument, "op 'layer_norm' over {}: a parameter is {}, expected this size",
           shape_to_string(shape), describe(parameter));
    }
  }
}

ShardedTensor layer_normalized(const ShardedTensor& input, const std::vector<std::int64_t>& shape,
                               const LayerNormOptions& options) {
  const Chunks chunks = chunks_of("layer_norm", input);
  check_layer_norm(input, shape, options);
  const ProcessGroup& group = input.process_group();
  at::Tensor weight = replicated_parameter(group, options.weight), bias = replicated_parameter(group, options.bias);
  at::Tensor local = input.local_tensor();
  const auto first = static_cast<std::int64_t>(input.size().size() - shape.size());
  if (chunks.dim < first) {
    local = at::layer_norm(local, shape, weight, bias, options.eps);
    return with_chunks(local, input.shared_spec(), input.size(), input);
  }
  local = widened(local);
  std::vector<std::int64_t> dims(shape.size());
  std::iota(dims.begin(), dims.end(), first);
  const auto count =
      static_cast<double>(std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>()));
  const at::Tensor mean = functional::all_reduce(group, local.sum(dims, true)) / count;
  const at::Tensor centred = local - mean;
  const at::Tensor variance = functional::all_reduce(group, centred.square().sum(dims, true)) / count;
  local = centred * at::rsqrt(variance + options.eps);
  const auto part_of = [&](const at::Tensor& parameter) {
    return parameter.narrow(chunks.dim - first, std::min(chunks.begin(), parameter.size(chunks.dim - first)),
                            chunks.size());
  };
  if (weight.defined()) local = local * part_of(weight);
  if (bias.defined()) local = local + part_of(bias);
  return with_chunks(narrowed_as(input.local_tensor(), local), input.shared_spec(), input.size(), input);
}

}  // namespace

const BuiltIn softmax_op(softmax, "softmax", ChunkShardingSpec::kKind,
                         [](const ShardedTensor& input, std::int64_t along) {
                           const Chunks chunks = chunks_of("softmax", input);
                           const std::int64_t dim = checked_dim("softmax", input, along);
                           const at::Tensor& local = input.local_tensor();
                           const at::Tensor result = dim == chunks.dim
                                                         ? softmax_over_ranks(local, dim, input.process_group())
                                                         : at::softmax(local, dim);
                           return with_chunks(result, input.shared_spec(), input.size(), input);
                         });

std::string describe(const LayerNormOptions& options) {
  return fmt::format("LayerNormOptions{{weight={}, bias={}, eps={}}}", describe(options.weight), describe(options.bias),
                     options.eps);
}

const BuiltIn layer_norm_op(layer_norm, "layer_norm", ChunkShardingSpec::kKind, layer_normalized);

const BuiltIn bmm_op(bmm, "bmm", ChunkShardingSpec::kKind, [](const ShardedTensor& a, const ShardedTensor& b) {
  const Chunks chunks = chunks_of("bmm", a), others = chunks_of("bmm", b);
  const bool fits = a.size().size() == 3 && b.size().size() == 3 && a.size()[0] == b.size()[0] &&
                    a.size()[2] == b.size()[1] && a.scalar_type() == b.scalar_type();
  if (!fits) {
    fail(ErrorCode::invalid_argument, "op 'bmm' of {} and {}: expected [n, i, j] and [n, j, k] of one dtype",
         describe(a), describe(b));
  }
  if (chunks.dim != 0 || others.dim != 0 || chunks.comparable != others.comparable) {
    fail(ErrorCode::unsupported, "op 'bmm' of {} and {}: expected both sharded in dimension 0 with the same placements",
         describe(a), describe(b));
  }
  return with_chunks(at::bmm(a.local_tensor(), b.local_tensor()), a.shared_spec(),
                     {a.size()[0], a.size()[1], b.size()[2]}, a);
});

ShardedTensor softmax(const ShardedTensor& input, std::int64_t dim) { return softmax_op(input, dim); }
ShardedTensor layer_norm(const ShardedTensor& input, const std::vector<std::int64_t>& normalized_shape,
                         const LayerNormOptions& options) {
  return layer_norm_op(input, normalized_shape, options);
}
ShardedTensor bmm(const ShardedTensor& a, const ShardedTensor& b) { return bmm_op(a, b); }

}  // namespace tessera::ops
