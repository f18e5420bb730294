#include "checkpoint/inspect/compare_elements.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>

#include "checkpoint/inspect/numbers.h"

namespace tessera::checkpoint {
namespace {

// Elements that are compared together: their numbers stay in the first cache.
constexpr std::int64_t kComparedBlock = 1024;
constexpr double kFarthest = std::numeric_limits<double>::infinity();

using Numbers = std::array<double, 2 * kComparedBlock>;

// An integer of 64 bits, signed or not.
struct Integer {
  bool is_negative = false;
  std::uint64_t magnitude = 0;
};

Integer load_integer(DType dtype, const std::uint8_t* element) {
  if (dtype == DType::uint64) {
    Integer value;
    std::memcpy(&value.magnitude, element, sizeof value.magnitude);
    return value;
  }
  std::int64_t number = 0;
  if (dtype == DType::int64) {
    std::memcpy(&number, element, sizeof number);
  } else {
    double value = 0;
    widen_elements(dtype, element, &value, 1);
    number = static_cast<std::int64_t>(value);
  }
  const auto bits = static_cast<std::uint64_t>(number);
  return {number < 0, number < 0 ? 0 - bits : bits};
}

double distance(const Integer& a, const Integer& b) {
  if (a.is_negative != b.is_negative) return static_cast<double>(a.magnitude) + static_cast<double>(b.magnitude);
  return static_cast<double>(std::max(a.magnitude, b.magnitude) - std::min(a.magnitude, b.magnitude));
}

// The distance of numbers as Difference defines it.
double distance(double a, double b) {
  if (a == b || (std::isnan(a) && std::isnan(b))) return 0;
  const double result = std::fabs(a - b);
  return std::isfinite(a) && std::isfinite(b) ? result : kFarthest;
}

// How two elements compare.
struct Comparison {
  bool equal = false;       // within the tolerance
  double absolute = 0;      // |a - b|
  double magnitude_b = 0;   // |b|
  bool has_numbers = true;  // whether the members above mean something; if not, `equal` is that of the bits
  double relative() const {
    if (absolute == 0) return 0;
    return magnitude_b == 0 || absolute == kFarthest ? kFarthest : absolute / magnitude_b;
  }
};

class Comparer {
 public:
  Comparer(const Elements& a, const Elements& b, const std::optional<Tolerance>& tolerance)
      : a_(a),
        b_(b),
        size_a_(dtype_size(a.dtype)),
        size_b_(dtype_size(b.dtype)),
        numbers_(number_kind(a.dtype) == NumberKind::pair ? 0 : numbers_per_element(a.dtype)),
        is_integer_(number_kind(a.dtype) == NumberKind::integer && number_kind(b.dtype) == NumberKind::integer),
        is_wide_(is_integer_ && std::max(size_a_, size_b_) == 8),
        by_value_(tolerance && numbers_ > 0),
        tolerance_(tolerance.value_or(Tolerance())) {}

  void compare_block(std::int64_t from, std::int64_t count, std::int64_t begin, ElementDifferences& found) {
    const std::uint8_t *const a = a_.bytes + from * size_a_, *const b = b_.bytes + from * size_b_;
    const auto bytes = static_cast<std::size_t>(count * size_a_);
    const bool same_bits = a_.dtype == b_.dtype && std::memcmp(a, b, bytes) == 0;
    if (same_bits && (!by_value_ || is_integer_ || tolerance_.equal_nan)) return;
    if (numbers_ > 0) {
      widen_elements(a_.dtype, a, numbers_a_.data(), count);
      widen_elements(b_.dtype, b, numbers_b_.data(), count);
      if (by_value_ && numbers_ == 1 && !is_wide_ && all_within(count)) return;
    }
    const bool are_reals = numbers_ == 1 && !is_wide_;
    for (std::int64_t i = 0; i < count; ++i) {
      if (are_reals && is_settled(i, begin + from + i, found)) continue;
      if (!by_value_ && std::memcmp(a + i * size_a_, b + i * size_b_, static_cast<std::size_t>(size_a_)) == 0) continue;
      const Comparison comparison = compare(i, a + i * size_a_, b + i * size_b_);
      if (!by_value_ || !comparison.equal) add(begin + from + i, comparison, found);
    }
  }

 private:
  // Returns true only if all elements are equal. Without branches, so that it is vectorized.
  bool all_within(std::int64_t count) const {
    const double atol = tolerance_.atol, rtol = tolerance_.rtol;
    std::int64_t within = 0;
    for (std::int64_t i = 0; i < count; ++i) {
      const double a = numbers_a_[static_cast<std::size_t>(i)], b = numbers_b_[static_cast<std::size_t>(i)];
      const double difference = std::fabs(a - b);
      within += static_cast<std::int64_t>(difference <= atol + rtol * std::fabs(b)) &
                static_cast<std::int64_t>(difference < kFarthest);
    }
    return within == count;
  }

  // Compares two finite real numbers, and counts them if they differ. Returns false if that takes a closer look: at
  // NaN, infinities, and the bits of equal numbers.
  bool is_settled(std::int64_t i, std::int64_t position, ElementDifferences& found) const {
    const double b = numbers_b_[static_cast<std::size_t>(i)];
    const double magnitude_b = std::fabs(b), difference = std::fabs(numbers_a_[static_cast<std::size_t>(i)] - b);
    if (!(difference < kFarthest) || (difference == 0 && !by_value_)) return false;
    if (by_value_ && difference <= tolerance_.atol + tolerance_.rtol * magnitude_b) return true;
    // Without the division for most elements.
    const bool is_new = found.worst_absolute.position < 0 || difference > found.worst_absolute.difference ||
                        difference > found.worst_relative.difference * magnitude_b;
    if (is_new) {
      add(position, {false, difference, magnitude_b}, found);
    } else {
      ++found.count;
    }
    return true;
  }

  Comparison compare(std::int64_t i, const std::uint8_t* a, const std::uint8_t* b) const {
    Comparison result;
    if (numbers_ == 0) {
      result.has_numbers = false;
      return result;
    }
    const double* const x = &numbers_a_[static_cast<std::size_t>(i * numbers_)];
    const double* const y = &numbers_b_[static_cast<std::size_t>(i * numbers_)];
    bool both_nan = std::isnan(x[0]) && std::isnan(y[0]);
    bool one_nan = std::isnan(x[0]) || std::isnan(y[0]);
    if (is_wide_) {
      const Integer integer_b = load_integer(b_.dtype, b);
      result.absolute = distance(load_integer(a_.dtype, a), integer_b);
      result.magnitude_b = static_cast<double>(integer_b.magnitude);
    } else if (numbers_ == 1) {
      result.absolute = distance(x[0], y[0]);
      result.magnitude_b = std::fabs(y[0]);
    } else {
      // A complex number with a NaN is NaN.
      const bool nan_a = std::isnan(x[0]) || std::isnan(x[1]), nan_b = std::isnan(y[0]) || std::isnan(y[1]);
      both_nan = nan_a && nan_b;
      one_nan = nan_a || nan_b;
      result.absolute = both_nan ? 0 : std::hypot(distance(x[0], y[0]), distance(x[1], y[1]));
      result.magnitude_b = std::hypot(y[0], y[1]);
    }
    if (one_nan) {
      result.equal = both_nan && tolerance_.equal_nan;
    } else {
      result.equal =
          result.absolute == 0 ||
          (result.absolute < kFarthest && result.absolute <= tolerance_.atol + tolerance_.rtol * result.magnitude_b);
    }
    return result;
  }

  static void add(std::int64_t position, const Comparison& comparison, ElementDifferences& found) {
    if (found.count++ == 0) found.first.position = position;
    if (!comparison.has_numbers) return;
    const auto keep = [position](DifferingElement& worst, double difference) {
      if (worst.position >= 0 && difference <= worst.difference) return;
      worst.position = position;
      worst.difference = difference;
    };
    keep(found.worst_absolute, comparison.absolute);
    keep(found.worst_relative, comparison.relative());
  }

  const Elements a_, b_;
  const std::int64_t size_a_, size_b_, numbers_;
  const bool is_integer_, is_wide_, by_value_;
  const Tolerance tolerance_;
  Numbers numbers_a_, numbers_b_;
};

void merge_worst(DifferingElement& worst, const DifferingElement& other) {
  if (other.position < 0) return;
  const bool is_worse = worst.position < 0 || other.difference > worst.difference ||
                        (other.difference == worst.difference && other.position < worst.position);
  if (is_worse) worst = other;
}

}  // namespace

void ElementDifferences::merge(const ElementDifferences& other) {
  if (other.count == 0) return;
  if (count == 0 || other.first.position < first.position) first = other.first;
  count += other.count;
  merge_worst(worst_absolute, other.worst_absolute);
  merge_worst(worst_relative, other.worst_relative);
}

ElementDifferences compare_elements(const Elements& a, const Elements& b, std::int64_t count, std::int64_t begin,
                                    const std::optional<Tolerance>& tolerance) {
  ElementDifferences found;
  // Bytes that are equal need no look at single elements.
  if (!tolerance && std::memcmp(a.bytes, b.bytes, static_cast<std::size_t>(count * dtype_size(a.dtype))) == 0) {
    return found;
  }
  Comparer comparer(a, b, tolerance);
  for (std::int64_t done = 0; done < count; done += kComparedBlock) {
    comparer.compare_block(done, std::min(kComparedBlock, count - done), begin, found);
  }
  for (DifferingElement* element : {&found.first, &found.worst_absolute, &found.worst_relative}) {
    if (element->position < 0) continue;
    const std::int64_t at = element->position - begin;
    element->a = element_to_string(a.dtype, a.bytes + at * dtype_size(a.dtype));
    element->b = element_to_string(b.dtype, b.bytes + at * dtype_size(b.dtype));
  }
  return found;
}

}  // namespace tessera::checkpoint
