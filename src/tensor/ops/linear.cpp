#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/linear.h>

#include "tensor/ops/built_in.h"
#include "tensor/ops/chunks.h"
#include "tensor/ops/rank_arguments.h"
#include "tessera/base/error.h"
#include "tessera/comm/functional.h"
#include "tessera/tensor/ops.h"

namespace tessera::ops {

namespace {

void check_weight(const ShardedTensor& weight) {
  if (weight.size().size() == 2) return;
  fail(ErrorCode::invalid_argument, "op 'linear': weight is {}, expected 2 dimensions", describe(weight));
}

void check_input(const std::vector<std::int64_t>& size, const std::string& described, const ShardedTensor& weight) {
  if (!size.empty() && size.back() == weight.size()[1]) return;
  fail(ErrorCode::invalid_argument, "op 'linear': input is {}, expected {} columns as in weight {}", described,
       weight.size()[1], describe(weight));
}

void check_bias(const at::Tensor& bias, const ShardedTensor& weight) {
  if (!bias.defined() || (bias.dim() == 1 && bias.size(0) == weight.size()[0])) return;
  fail(ErrorCode::invalid_argument, "op 'linear': bias is {}, expected 1 dimension of {} as in weight {}",
       describe(bias), weight.size()[0], describe(weight));
}

// A 1-D input is one row.
at::Tensor as_batch(const at::Tensor& input) { return input.dim() == 1 ? input.unsqueeze(0) : input; }

// Each rank has some rows of the weight: it computes these columns of the result for all ranks' inputs.
ShardedTensor column_wise(const at::Tensor& input, const ShardedTensor& weight, const at::Tensor& bias,
                          const Chunks& chunks) {
  const ProcessGroup& group = weight.process_group();
  at::Tensor own_bias;
  if (bias.defined()) {
    own_bias = functional::sum_gradients(group, bias).narrow(0, std::min(chunks.begin(), bias.size(0)), chunks.size());
  }
  const at::Tensor local = at::linear(functional::all_gather(group, as_batch(input)), weight.local_tensor(), own_bias);
  ShardedTensor::Sizes size = local.sizes().vec();
  size.back() = weight.size()[0];
  return with_chunks(local, chunks.along(-1), size, weight);
}

// Each rank has some columns of the weight. Returns these columns of all ranks' inputs: [size * n, ..., columns].
at::Tensor own_columns_of_all(const at::Tensor& batch, const ShardedTensor& weight, const Chunks& chunks) {
  std::vector<at::Tensor> parts;
  std::vector<std::int64_t> in_splits;
  for (std::size_t r = 0; r < chunks.sizes.size(); ++r) {
    const std::int64_t begin = std::min(chunks.begins[r], batch.size(-1));
    parts.push_back(batch.narrow(-1, begin, chunks.sizes[r]).reshape({-1}));
    in_splits.push_back(parts.back().numel());
  }
  std::vector<std::int64_t> size = batch.sizes().vec();
  size.back() = chunks.size();
  const std::vector<std::int64_t> out_splits(in_splits.size(), in_splits[static_cast<std::size_t>(chunks.rank)]);
  size.front() *= static_cast<std::int64_t>(out_splits.size());
  return functional::all_to_all(weight.process_group(), at::cat(parts), out_splits, in_splits).view(size);
}

// Returns the summand of this rank's columns of the weight; each rank adds its share of the bias.
PartialTensor row_wise(const at::Tensor& columns, const ShardedTensor& weight, const at::Tensor& bias) {
  const ProcessGroup& group = weight.process_group();
  const at::Tensor share = bias.defined() ? functional::sum_gradients(group, bias) / group.size() : bias;
  return {group, at::linear(columns, weight.local_tensor(), share)};
}

LinearResult linear_of_sharded(const ShardedTensor& input, const ShardedTensor& weight, const at::Tensor& bias) {
  const Chunks chunks = chunks_of("linear", weight), of_input = chunks_of("linear", input);
  check_input(input.size(), describe(input), weight);
  check_bias(bias, weight);
  const auto last = static_cast<std::int64_t>(input.size().size()) - 1;
  if (chunks.dim != 1 || of_input.dim != last || of_input.comparable != chunks.comparable) {
    fail(ErrorCode::unsupported,
         "op 'linear' of {} by {}: expected an input sharded in its last dimension as the weight in dimension 1",
         describe(input), describe(weight));
  }
  return row_wise(as_batch(input.local_tensor()), weight, bias);
}

}  // namespace

const BuiltIn linear_op(linear, "linear", ChunkShardingSpec::kKind,
                        [](const std::variant<at::Tensor, ShardedTensor>& input, const ShardedTensor& weight,
                           const at::Tensor& bias) -> LinearResult {
                          if (const auto* sharded = std::get_if<ShardedTensor>(&input)) {
                            check_weight(weight);
                            return linear_of_sharded(*sharded, weight, bias);
                          }
                          const at::Tensor& own = std::get<at::Tensor>(input);
                          const std::vector<std::string> arguments = {describe(own), describe(weight), describe(bias)};
                          Chunks chunks;
                          agree_on_arguments("linear", weight.process_group(), arguments, [&] {
                            check_weight(weight);
                            chunks = chunks_of("linear", weight);
                            check_input(own.defined() ? own.sizes().vec() : ShardedTensor::Sizes(), describe(own),
                                        weight);
                            check_bias(bias, weight);
                          });
                          if (chunks.dim == 0) return column_wise(own, weight, bias, chunks);
                          return row_wise(own_columns_of_all(as_batch(own), weight, chunks), weight, bias);
                        });

LinearResult linear(const std::variant<at::Tensor, ShardedTensor>& input, const ShardedTensor& weight,
                    const at::Tensor& bias) {
  return linear_op(input, weight, bias);
}

}  // namespace tessera::ops
