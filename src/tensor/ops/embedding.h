#pragma once
// What embedding and embedding_bag have in common. Indices are 1-D; those of all ranks, one behind the other, are
// called `all`.

#include <ATen/core/Tensor.h>

#include <string_view>

#include "tensor/ops/chunks.h"
#include "tessera/tensor/ops.h"

namespace tessera::ops {

// Throws Error(unsupported, invalid_argument) where `weight` and options can't be meant, alike on all ranks.
void check_embedding(std::string_view op, const ShardedTensor& weight, const EmbeddingOptions& options);

// Throws Error(invalid_argument) for indices that are no integers or not in `weight`.
void check_indices(std::string_view op, const at::Tensor& input, const ShardedTensor& weight);

// Of those indices of `all` whose rows are here.
struct OwnRows {
  at::Tensor positions;  // in `all`, ascending
  at::Tensor rows;       // of the local shard
};
OwnRows own_rows(const at::Tensor& all, const Chunks& chunks);

// Scales down those rows of `weight`, in place, that are looked up and too long. All ranks must call it.
void renormalize(const ShardedTensor& weight, const Chunks& chunks, const at::Tensor& all,
                 const EmbeddingOptions& options);

// From [size * n, columns of this rank] for all ranks to [n, all columns] for this one.
at::Tensor distribute_columns(const at::Tensor& results, const ShardedTensor& weight, const Chunks& chunks);

}  // namespace tessera::ops
