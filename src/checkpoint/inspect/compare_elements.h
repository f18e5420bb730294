#pragma once
// Comparison of the elements of two tensors in memory.

#include <cstdint>
#include <optional>
#include <string>

#include "tessera/base/dtype.h"
#include "tessera/checkpoint/diff.h"

namespace tessera::checkpoint {

// Row-major elements of one side.
struct Elements {
  DType dtype = DType::float32;
  const std::uint8_t* bytes = nullptr;
};

struct DifferingElement {
  std::int64_t position = -1;  // among all elements; -1 if there is none
  double difference = 0;
  std::string a, b;  // its text on each side
};

struct ElementDifferences {
  std::uint64_t count = 0;
  DifferingElement first, worst_absolute, worst_relative;  // as in Difference

  // Adds those of other elements of the same tensors.
  void merge(const ElementDifferences& other);
};

// Compares `count` elements, of which the first is at position `begin`, by value if there is a tolerance. Then the
// dtypes may differ if both have one number per element, or both are complex. Elements without numbers are compared bit
// by bit.
ElementDifferences compare_elements(const Elements& a, const Elements& b, std::int64_t count, std::int64_t begin,
                                    const std::optional<Tolerance>& tolerance);

}  // namespace tessera::checkpoint
