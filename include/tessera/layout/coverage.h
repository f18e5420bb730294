#pragma once
/// \file
/// Whether boxes overlap and whether they cover a shape: what makes a set of shards a tensor.
///
/// Law: boxes partition a shape <=> all are valid in it, find_overlap() and find_hole() find nothing.
/// PyTorch: torch/distributed/_shard/sharding_spec/_internals.py (there pair by pair).

#include <optional>
#include <span>
#include <utility>

#include "tessera/layout/box.h"

namespace tessera {

/// Two boxes that share an element, as indices into `boxes`, first < second; nothing if no two do. Empty boxes overlap
/// nothing. O(n log n) in the number of boxes for rank <= 2 (a sweep) and, for any rank, for boxes that stem from a
/// grid or from nested cuts, such as flat intervals. Boxes of higher rank that no plane separates may cost O(n^(rank/2)
/// log n).
std::optional<std::pair<std::size_t, std::size_t>> find_overlap(const BoxList& boxes);

/// A box of elements of `shape` that no box covers; nothing if all are covered. The boxes must be valid in `shape`;
/// they may overlap. Costs as `find_overlap`, whatever the number of elements.
std::optional<Box> find_hole(std::span<const std::int64_t> shape, const BoxList& boxes);

}  // namespace tessera
