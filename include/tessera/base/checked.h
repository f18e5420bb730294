#pragma once
/// \file
/// Checked integer arithmetic for numbers read from a file. Every overflow throws `Error(corrupt)` naming the quantity
/// that was being computed.

#include <concepts>
#include <cstdint>
#include <limits>
#include <span>
#include <string_view>
#include <utility>

#include "tessera/base/error.h"

namespace tessera {

namespace detail {

// Throws the error of an operation whose exact result is below or above the numbers of T.
template <std::integral T>
[[noreturn]] void fail_overflow(std::string_view what, T a, char operation, T b, bool is_below) {
  fail(ErrorCode::corrupt, "{} overflows: {} {} {}, expected {} {}", what, a, operation, b,
       is_below ? "at least" : "at most", is_below ? std::numeric_limits<T>::min() : std::numeric_limits<T>::max());
}

}  // namespace detail

/// Returns a + b. Throws `Error(corrupt)` "<what> overflows".
template <std::integral T>
T checked_add(T a, T b, std::string_view what) {
  T result;
  if (__builtin_add_overflow(a, b, &result)) detail::fail_overflow(what, a, '+', b, std::cmp_less(a, 0));
  return result;
}

/// Returns a * b. Throws `Error(corrupt)` "<what> overflows".
template <std::integral T>
T checked_multiply(T a, T b, std::string_view what) {
  T result;
  if (__builtin_mul_overflow(a, b, &result))
    detail::fail_overflow(what, a, '*', b, std::cmp_less(a, 0) != std::cmp_less(b, 0));
  return result;
}

/// Returns `value` as `To`. Throws `Error(corrupt)` if it does not fit.
template <std::integral To, std::integral From>
To checked_cast(From value, std::string_view what) {
  if (!std::in_range<To>(value))
    fail(ErrorCode::corrupt, "{} out of range: {}, expected {} to {}", what, value, std::numeric_limits<To>::min(),
         std::numeric_limits<To>::max());
  return static_cast<To>(value);
}

/// Returns the number of elements of a shape, 1 for a scalar. Throws `Error(corrupt)` for a negative size, and for an
/// overflow even if another size is 0.
std::int64_t checked_numel(std::span<const std::int64_t> sizes, std::string_view what);

}  // namespace tessera
