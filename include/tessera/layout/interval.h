#pragma once
/// \file
/// A half-open interval of indices in one dimension.

#include <cstdint>

namespace tessera {

/// The indices begin <= i < end of a dimension.
struct Interval {
  std::int64_t begin = 0, end = 0;
  std::int64_t size() const { return end - begin; }
  bool operator==(const Interval&) const = default;
};

}  // namespace tessera
