#pragma once
/// \file
/// A shard of a sharded tensor on this rank: its elements and its place in the full tensor.
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

  /// Creates a shard of `rank` with the tensor's sizes and device, at `offsets` of the full tensor. Throws
  /// `Error(invalid_argument)` unless there is an offset for each dimension.
  static Shard from_tensor_and_offsets(const at::Tensor& tensor, std::vector<std::int64_t> offsets, int rank);
};

}  // namespace tessera
