#pragma once
/// \file
/// Integer arithmetic on numbers that came from a file: every overflow throws `Error(corrupt)` naming what was being
/// computed.

#include <concepts>
#include <cstdint>
#include <span>
#include <string_view>
#include <utility>

#include "tessera/base/error.h"

namespace tessera {

/// a + b, or `Error(corrupt)` "<what> overflows".
template <std::integral T>
T checked_add(T a, T b, std::string_view what) {
  T result;
  if (__builtin_add_overflow(a, b, &result)) fail(ErrorCode::corrupt, "{} overflows: {} + {}", what, a, b);
  return result;
}

/// a * b, or `Error(corrupt)` "<what> overflows".
template <std::integral T>
T checked_multiply(T a, T b, std::string_view what) {
  T result;
  if (__builtin_mul_overflow(a, b, &result)) fail(ErrorCode::corrupt, "{} overflows: {} * {}", what, a, b);
  return result;
}

/// `value` as `To`, or `Error(corrupt)` when it doesn't fit.
template <std::integral To, std::integral From>
To checked_cast(From value, std::string_view what) {
  if (!std::in_range<To>(value)) fail(ErrorCode::corrupt, "{} out of range: {}", what, value);
  return static_cast<To>(value);
}

/// The number of elements of a shape; 1 for no dimension. Throws `Error(corrupt)` for a negative size or an overflow,
/// also where a later size is 0.
std::int64_t checked_numel(std::span<const std::int64_t> sizes, std::string_view what);

}  // namespace tessera
