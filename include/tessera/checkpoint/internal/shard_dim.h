#pragma once
// The dimension in which `reshard` shards a tensor.

#include <cstdint>

namespace tessera::checkpoint {

// Returns `dim`, counted from the end if it is negative, or the last of the `dims` dimensions of a tensor that does not
// have it. `dims` is at least 1.
inline std::int64_t dim_to_shard(std::int64_t dims, std::int64_t dim) {
  const std::int64_t from_first = dim < 0 ? dim + dims : dim;
  return from_first < 0 || from_first >= dims ? dims - 1 : from_first;
}

}  // namespace tessera::checkpoint
