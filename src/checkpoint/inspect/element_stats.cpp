#include "checkpoint/inspect/element_stats.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "checkpoint/inspect/numbers.h"
#include "tessera/base/cast.h"

namespace tessera::checkpoint {
namespace {

constexpr std::int64_t kStatsBlock = 2048;
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinite = std::numeric_limits<double>::infinity();

template <typename T>
void find_range(const std::uint8_t* elements, std::int64_t count, T& least, T& most) {
  T low = least, high = most;
  for (std::int64_t i = 0; i < count; ++i) {
    T value;
    std::memcpy(&value, elements + i * static_cast<std::int64_t>(sizeof(T)), sizeof(T));
    low = std::min(low, value);
    high = std::max(high, value);
  }
  least = low;
  most = high;
}

// Divides numbers into their parts, leaves out those that are NaN, and summarizes the rest.
void add_complex(const double* numbers, std::int64_t count, ElementStats& stats) {
  std::array<double, kStatsBlock> real, imaginary;
  std::int64_t kept = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const double x = numbers[2 * i], y = numbers[2 * i + 1];
    if (std::isnan(x) || std::isnan(y)) {
      ++stats.complex_nans;
      continue;
    }
    stats.complex_infs += std::isinf(x) || std::isinf(y) ? 1 : 0;
    stats.complex_zeros += x == 0 && y == 0 ? 1 : 0;
    real[static_cast<std::size_t>(kept)] = x;
    imaginary[static_cast<std::size_t>(kept++)] = y;
  }
  stats.real.merge(summarize(real.data(), kept));
  stats.imaginary.merge(summarize(imaginary.data(), kept));
}

// Returns the mean with the infinities that the moments leave out.
double mean_of(const Summary& summary) {
  if (summary.positive_infs > 0) return summary.negative_infs > 0 ? kNaN : kInfinite;
  return summary.negative_infs > 0 ? -kInfinite : summary.finite.unscaled_mean();
}

}  // namespace

void ElementStats::merge(const ElementStats& next) {
  elements += next.elements;
  real.merge(next.real);
  imaginary.merge(next.imaginary);
  complex_zeros += next.complex_zeros;
  complex_nans += next.complex_nans;
  complex_infs += next.complex_infs;
  signed_min = std::min(signed_min, next.signed_min);
  signed_max = std::max(signed_max, next.signed_max);
  unsigned_min = std::min(unsigned_min, next.unsigned_min);
  unsigned_max = std::max(unsigned_max, next.unsigned_max);
}

void ElementStats::finish(DType dtype, TensorStats& tensor) const {
  const bool is_complex = number_kind(dtype) == NumberKind::complex;
  tensor.elements = elements;
  tensor.nans = is_complex ? complex_nans : real.nans;
  tensor.infs = is_complex ? complex_infs : real.positive_infs + real.negative_infs;
  tensor.zeros = is_complex ? complex_zeros : real.zeros;
  const std::uint64_t counted = elements - tensor.nans;
  tensor.norm = tensor.infs > 0 ? kInfinite : std::hypot(real.finite.norm(), imaginary.finite.norm());
  if (counted == 0) return;
  if (counted > 1) {
    const double of_imaginary = is_complex ? imaginary.finite.deviation() : 0;
    tensor.stddev = tensor.infs > 0 ? kNaN : std::hypot(real.finite.deviation(), of_imaginary);
  }
  if (is_complex) {
    tensor.mean = std::complex<double>(mean_of(real), mean_of(imaginary));
    return;
  }
  tensor.mean = mean_of(real);
  if (number_kind(dtype) != NumberKind::integer) {
    tensor.min = real.negative_infs > 0 ? -kInfinite : real.min;
    tensor.max = real.positive_infs > 0 ? kInfinite : real.max;
    if (real.finite.count == 0 && real.negative_infs == 0) tensor.min = kInfinite;
    if (real.finite.count == 0 && real.positive_infs == 0) tensor.max = -kInfinite;
  } else if (dtype == DType::uint64) {
    tensor.min = unsigned_min;
    tensor.max = unsigned_max;
  } else if (dtype == DType::int64) {
    tensor.min = signed_min;
    tensor.max = signed_max;
  } else {
    tensor.min = static_cast<std::int64_t>(real.min);
    tensor.max = static_cast<std::int64_t>(real.max);
  }
}

ElementStats element_stats(DType dtype, std::uint8_t* elements, std::int64_t count) {
  ElementStats stats;
  const NumberKind kind = number_kind(dtype);
  const std::int64_t each = numbers_per_element(dtype);
  stats.elements = static_cast<std::uint64_t>(kind == NumberKind::pair ? 2 * count : count);
  if (dtype == DType::int64) find_range(elements, count, stats.signed_min, stats.signed_max);
  if (dtype == DType::uint64) find_range(elements, count, stats.unsigned_min, stats.unsigned_max);
  if (dtype == DType::float32) {
    stats.real = summarize(reinterpret_cast<float*>(elements), count);
    return stats;
  }
  if (dtype == DType::float64) {
    stats.real = summarize(reinterpret_cast<double*>(elements), count);
    return stats;
  }
  const bool fits_float = can_cast(dtype, DType::float32);
  alignas(16) std::array<float, kStatsBlock> floats;
  alignas(16) std::array<double, 2 * kStatsBlock> doubles;
  for (std::int64_t done = 0; done < count; done += kStatsBlock) {
    const std::int64_t n = std::min(kStatsBlock, count - done);
    const std::uint8_t* const block = elements + done * dtype_size(dtype);
    if (fits_float) {
      cast(dtype, block, DType::float32, reinterpret_cast<std::uint8_t*>(floats.data()), n);
      stats.real.merge(summarize(floats.data(), n));
      continue;
    }
    widen_elements(dtype, block, doubles.data(), n);
    if (kind == NumberKind::complex) {
      add_complex(doubles.data(), n, stats);
    } else {
      stats.real.merge(summarize(doubles.data(), each * n));
    }
  }
  return stats;
}

}  // namespace tessera::checkpoint
