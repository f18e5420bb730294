#pragma once
/// \file
/// One shard of a sharded tensor, on this rank.
///
/// A plain value. PyTorch: torch/distributed/_shard/sharded_tensor/shard.py.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "tessera/layout/shard_metadata.h"

namespace tessera {

struct Shard {
  at::Tensor tensor;
  ShardMetadata metadata;

  /// A shard of this rank: the tensor's sizes at `offsets`, on its device. Throws `Error(invalid_argument)` for another
  /// number of offsets than dimensions.
  static Shard from_tensor_and_offsets(const at::Tensor& tensor, std::vector<std::int64_t> offsets, int rank);
};

}  // namespace tessera
