#pragma once
/// \file
/// Overlaps and holes of a set of shards, which decide whether the shards partition a tensor.
///
/// Law: boxes partition a shape <=> all are valid in it and find_overlap() and find_hole() find nothing. PyTorch:
/// torch/distributed/_shard/sharding_spec/_internals.py (which compares all pairs).

#include <optional>
#include <span>
#include <utility>

#include "tessera/layout/box.h"

namespace tessera {

/// Returns two boxes that share an element, as indices into `boxes` with first < second; nothing if no two do. Empty
/// boxes overlap nothing. Takes O(n log n) for n boxes of rank <= 2 (a sweep), and also for boxes of any rank that come
/// from a grid or from nested splits, such as flat intervals. Boxes of higher rank that no plane separates may take
/// O(n^(rank/2) log n).
std::optional<std::pair<std::size_t, std::size_t>> find_overlap(const BoxList& boxes);

/// Returns a box of elements of `shape` that no box covers; nothing if all are covered. The boxes must be valid in
/// `shape` and may overlap. Takes as long as `find_overlap`, independently of the number of elements.
std::optional<Box> find_hole(std::span<const std::int64_t> shape, const BoxList& boxes);

}  // namespace tessera
