#pragma once
// How one placement splits what a rank holds of a tensor dimension.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "tessera/layout/interval.h"
#include "tessera/layout/placement.h"

namespace tessera {

// Returns the number of elements of all intervals.
std::int64_t count_of(std::span<const Interval> intervals);

// Appends to `to` what coordinate `i` along a mesh dimension of `length` ranks gets of `from`, in order. An interval is
// merged with the one before it, from index `first` on, if that ends where it begins.
void append_shard(std::vector<Interval>& to, std::size_t first, std::span<const Interval> from, const Placement& shard,
                  std::int64_t length, std::int64_t i);

}  // namespace tessera
