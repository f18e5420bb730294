#pragma once
/// \file
/// Construction of a sharded tensor from the ranks' chunks, without knowing its size.

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "tessera/comm/process_group.h"
#include "tessera/tensor/sharded_tensor.h"

namespace tessera {

/// Creates the concatenation of the ranks' chunks along dimension `dim`, in the order of the ranks, and computes its
/// size and the offsets from theirs. Rank r holds its chunk, which may be empty. A collective of `group`. Every rank
/// throws `Error(invalid_argument)` if a chunk has no dimension `dim`, if chunks differ in another dimension, and as
/// ShardedTensor::from_local_shards. PyTorch: init_from_local_shards with None in the size, for dimension 0.
ShardedTensor sharded_tensor_from_chunks(const at::Tensor& chunk, std::int64_t dim = 0, const ProcessGroup& group = {},
                                         bool init_rrefs = false);

}  // namespace tessera
