#pragma once
/// \file
/// The shards of a tensor that is split in one dimension over a number of ranks.

#include <cstdint>
#include <span>
#include <vector>

#include "tessera/layout/box.h"

namespace tessera {

/// Returns the boxes of ranks 0..ranks-1 for a `shape` split in dimension `dim` as `torch.chunk` and `Shard(dim)` split
/// it: ceil(size / ranks) rows each, fewer or none for the last ranks (an empty box at the end). A negative `dim`
/// counts from the end. A scalar is stored on rank 0 whatever `dim` is, and the list then has one box. Law: the boxes
/// partition the shape.
///
/// Throws `Error(invalid_argument)` for ranks < 1 or a dimension that the shape does not have. PyTorch:
/// torch/distributed/tensor/placement_types.py, torch/distributed/_shard/sharding_spec/chunk_sharding_spec.py.
BoxList chunk_boxes(std::span<const std::int64_t> shape, std::int64_t dim, std::int64_t ranks);

}  // namespace tessera
