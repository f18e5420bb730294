#pragma once
/// \file
/// How a tensor is cut when it is laid out for a number of ranks.

#include <cstdint>
#include <span>
#include <vector>

#include "tessera/layout/box.h"

namespace tessera {

/// The boxes of ranks 0..ranks-1 when dimension `dim` of `shape` is cut as `torch.chunk` and `Shard(dim)` cut it:
/// ceil(size / ranks) rows each, the last ones fewer or none (an empty box at the end). `dim` counts from the end if
/// negative. A scalar is whole on rank 0, whatever `dim`, and the list then has one box. Law: the boxes partition the
/// shape. PyTorch: torch/distributed/tensor/placement_types.py,
/// torch/distributed/_shard/sharding_spec/chunk_sharding_spec.py. Throws `Error(invalid_argument)` for ranks < 1 or a
/// dimension that the shape hasn't.
BoxList chunk_boxes(std::span<const std::int64_t> shape, std::int64_t dim, std::int64_t ranks);

}  // namespace tessera
