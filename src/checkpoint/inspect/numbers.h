#pragma once
// The numbers that elements represent.

#include <cstdint>

#include "tessera/base/dtype.h"

namespace tessera::checkpoint {

enum class NumberKind : std::uint8_t {
  none,     // bits without a number
  integer,  // bool included
  real,
  complex,
  pair,  // two real numbers in one element: float4_e2m1fn_x2
};
NumberKind number_kind(DType dtype);

// Returns the float64 values that widen_elements writes for an element: 2 for complex and pair, 0 for none, else 1.
std::int64_t numbers_per_element(DType dtype);

// Writes the values of `count` elements as float64, without loss except for integers of more than 53 bits, which are
// rounded. A complex number is its real part, followed by its imaginary part. `dtype` must have numbers.
void widen_elements(DType dtype, const std::uint8_t* elements, double* out, std::int64_t count);

}  // namespace tessera::checkpoint
