#pragma once
// Shared by embedding and embedding_bag. Indices are 1-D; `all` are those of all ranks, concatenated.

#include <ATen/core/Tensor.h>

#include <string_view>

#include "tensor/ops/chunks.h"
#include "tessera/tensor/ops.h"

namespace tessera::ops {

// Throws Error(unsupported) or Error(invalid_argument) for an invalid weight or options, the same on all ranks.
void check_embedding(std::string_view op, const ShardedTensor& weight, const EmbeddingOptions& options);

// Throws Error(invalid_argument) for indices that are not integers or out of range.
void check_indices(std::string_view op, const at::Tensor& input, const ShardedTensor& weight);

// The indices in `all` whose rows are on this rank.
struct OwnRows {
  at::Tensor positions;  // in `all`, ascending
  at::Tensor rows;       // in the local shard
};
OwnRows own_rows(const at::Tensor& all, const Chunks& chunks);

// Scales down, in place, the rows of `weight` that are looked up and exceed max_norm. All ranks must call it.
void renormalize(const ShardedTensor& weight, const Chunks& chunks, const at::Tensor& all,
                 const EmbeddingOptions& options);

// Exchanges results for all ranks in this rank's columns, [size * n, own columns], for this rank's results in all
// columns, [n, columns].
at::Tensor distribute_columns(const at::Tensor& results, const ShardedTensor& weight, const Chunks& chunks);

}  // namespace tessera::ops
