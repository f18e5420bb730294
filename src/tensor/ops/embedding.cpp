#include "tensor/ops/embedding.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_unique.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/embedding_renorm.h>
#include <ATen/ops/nonzero.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <cmath>

#include "tensor/ops/built_in.h"
#include "tensor/ops/rank_arguments.h"
#include "tessera/base/error.h"
#include "tessera/comm/functional.h"

namespace tessera::ops {

void check_embedding(std::string_view op, const ShardedTensor& weight, const EmbeddingOptions& options) {
  if (weight.size().size() != 2) {
    fail(ErrorCode::invalid_argument, "op '{}': weight is {}, expected 2 dimensions", op, describe(weight));
  }
  if (options.scale_grad_by_freq)
    fail(ErrorCode::unsupported, "op '{}': scale_grad_by_freq is not supported, expected false", op);
  if (options.sparse) fail(ErrorCode::unsupported, "op '{}': sparse is not supported, expected false", op);
  if (options.max_norm && !(*options.max_norm > 0)) {
    fail(ErrorCode::invalid_argument, "op '{}': max_norm is {}, expected more than 0", op, *options.max_norm);
  }
  if (options.padding_idx && (*options.padding_idx < 0 || *options.padding_idx >= weight.size()[0])) {
    fail(ErrorCode::invalid_argument, "op '{}': padding_idx is {}, expected a row of {}", op, *options.padding_idx,
         describe(weight));
  }
}

void check_indices(std::string_view op, const at::Tensor& input, const ShardedTensor& weight) {
  if (!input.defined() || (input.scalar_type() != at::kLong && input.scalar_type() != at::kInt)) {
    fail(ErrorCode::invalid_argument, "op '{}': input is {}, expected indices of int32 or int64", op, describe(input));
  }
  if (input.numel() == 0) return;
  const auto least = input.min().item<std::int64_t>(), greatest = input.max().item<std::int64_t>();
  if (least < 0 || greatest >= weight.size()[0]) {
    fail(ErrorCode::invalid_argument, "op '{}': index {} in input is out of range, expected 0 to {}", op,
         least < 0 ? least : greatest, weight.size()[0] - 1);
  }
}

OwnRows own_rows(const at::Tensor& all, const Chunks& chunks) {
  const at::Tensor is_here = all.ge(chunks.begin()).logical_and(all.lt(chunks.begin() + chunks.size()));
  const at::Tensor positions = at::nonzero(is_here).view({-1});
  return {positions, all.index_select(0, positions) - chunks.begin()};
}

namespace {

// Each rank has a part of every row: norms are reduced over the ranks.
void renormalize_parts(const ShardedTensor& weight, const at::Tensor& all, double max_norm, double norm_type) {
  const at::Tensor& local = weight.local_tensor();
  const at::Tensor looked_up = std::get<0>(at::_unique(all));
  const at::Tensor rows = widened(local.index_select(0, looked_up));
  at::Tensor norms;
  if (std::isinf(norm_type)) {
    norms = local.size(1) == 0 ? at::zeros({rows.size(0)}, rows.options()) : rows.abs().amax({1});
    weight.process_group().all_reduce(norms, ReduceOp::max);
  } else {
    norms = rows.abs().pow(norm_type).sum(1);
    weight.process_group().all_reduce(norms);
    norms = norms.pow(1 / norm_type);
  }
  // 1e-7 as in LibTorch.
  const at::Tensor scale = at::where(norms.gt(max_norm), max_norm / (norms + 1e-7), at::ones_like(norms));
  local.index_copy_(0, looked_up, narrowed_as(local, rows * scale.unsqueeze(1)));
}

}  // namespace

void renormalize(const ShardedTensor& weight, const Chunks& chunks, const at::Tensor& all,
                 const EmbeddingOptions& options) {
  if (!options.max_norm) return;
  const at::NoGradGuard no_grad;
  if (chunks.dim == 1) return renormalize_parts(weight, all, *options.max_norm, options.norm_type);
  const at::Tensor rows = own_rows(all, chunks).rows;
  at::Tensor local = weight.local_tensor().detach();
  if (rows.numel() != 0) at::embedding_renorm_(local, rows, *options.max_norm, options.norm_type);
}

at::Tensor distribute_columns(const at::Tensor& results, const ShardedTensor& weight, const Chunks& chunks) {
  const std::int64_t n = results.size(0) / weight.process_group().size();
  std::vector<std::int64_t> out_splits;
  for (const std::int64_t columns : chunks.sizes) out_splits.push_back(n * columns);
  const std::vector<std::int64_t> in_splits(out_splits.size(), n * chunks.size());
  const at::Tensor received =
      functional::all_to_all(weight.process_group(), results.reshape({-1}), out_splits, in_splits);
  std::vector<at::Tensor> by_rank = received.split_with_sizes(out_splits), columns;
  for (const int rank : chunks.ranks) {
    const auto r = static_cast<std::size_t>(rank);
    columns.push_back(by_rank[r].view({n, chunks.sizes[r]}));
  }
  return at::cat(columns, 1);
}

namespace {

// Every rank looks up all ranks' indices in its rows, with zeros for other rows; a reduce-scatter sums the results.
at::Tensor row_wise(const at::Tensor& all, const ShardedTensor& weight, const Chunks& chunks,
                    const EmbeddingOptions& options) {
  const OwnRows own = own_rows(all, chunks);
  std::int64_t padding = -1;
  if (options.padding_idx && *options.padding_idx >= chunks.begin() &&
      *options.padding_idx < chunks.begin() + chunks.size()) {
    padding = *options.padding_idx - chunks.begin();
  }
  const at::Tensor& local = weight.local_tensor();
  const at::Tensor found = at::embedding(local, own.rows, padding);
  const at::Tensor summand = at::zeros({all.numel(), weight.size()[1]}, local.options().requires_grad(false))
                                 .index_copy(0, own.positions, found);
  return functional::reduce_scatter(weight.process_group(), summand);
}

}  // namespace

std::string describe(const EmbeddingOptions& options) {
  return fmt::format("EmbeddingOptions{{padding_idx={}, max_norm={}, norm_type={}, scale_grad_by_freq={}, sparse={}}}",
                     options.padding_idx ? fmt::format("{}", *options.padding_idx) : "None",
                     options.max_norm ? fmt::format("{}", *options.max_norm) : "None", options.norm_type,
                     options.scale_grad_by_freq, options.sparse);
}

const BuiltIn embedding_op(embedding, "embedding", ChunkShardingSpec::kKind,
                           [](const at::Tensor& input, const ShardedTensor& weight, const EmbeddingOptions& options) {
                             const ProcessGroup& group = weight.process_group();
                             Chunks chunks;
                             agree_on_arguments("embedding", group,
                                                {describe(input), describe(weight), describe(options)}, [&] {
                                                  check_embedding("embedding", weight, options);
                                                  chunks = chunks_of("embedding", weight);
                                                  check_indices("embedding", input, weight);
                                                });
                             const at::Tensor all = functional::all_gather(group, input.reshape({-1}).to(at::kLong));
                             renormalize(weight, chunks, all, options);
                             const at::Tensor rows =
                                 chunks.dim == 0 ? row_wise(all, weight, chunks, options)
                                                 : distribute_columns(at::embedding(weight.local_tensor(), all,
                                                                                    options.padding_idx.value_or(-1)),
                                                                      weight, chunks);
                             std::vector<std::int64_t> size = input.sizes().vec();
                             size.push_back(weight.size()[1]);
                             return rows.view(size);
                           });

at::Tensor embedding(const at::Tensor& input, const ShardedTensor& weight, const EmbeddingOptions& options) {
  return embedding_op(input, weight, options);
}

}  // namespace tessera::ops
