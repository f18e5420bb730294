#pragma once
// Statistics of a list of elements of any dtype, and how those of consecutive lists are merged.

#include <cstdint>
#include <limits>

#include "checkpoint/inspect/moments.h"
#include "tessera/checkpoint/inspect/stats.h"

namespace tessera::checkpoint {

struct ElementStats {
  std::uint64_t elements = 0;  // numbers
  Summary real;                // of numbers that are not complex, and of the real parts of those that are
  // Of complex numbers alone. What is NaN in one part is left out of both.
  Summary imaginary;
  std::uint64_t complex_zeros = 0, complex_nans = 0, complex_infs = 0;
  // Exact, of integers alone.
  std::int64_t signed_min = std::numeric_limits<std::int64_t>::max();
  std::int64_t signed_max = std::numeric_limits<std::int64_t>::min();
  std::uint64_t unsigned_min = std::numeric_limits<std::uint64_t>::max(), unsigned_max = 0;

  // Adds what follows.
  void merge(const ElementStats& next);
  // Fills in the statistics of a tensor of this dtype, which must have numbers.
  void finish(DType dtype, TensorStats& tensor) const;
};

// `elements` is `count` elements of `dtype`, which must have numbers, and may be changed. They must be aligned to 8
// bytes.
ElementStats element_stats(DType dtype, std::uint8_t* elements, std::int64_t count);

}  // namespace tessera::checkpoint
