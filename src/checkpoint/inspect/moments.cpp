#include "checkpoint/inspect/moments.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <type_traits>

namespace tessera::checkpoint {
namespace {

// Numbers that are summarized together. They stay in the first cache for a second pass.
constexpr std::int64_t kSummaryBlock = 2048;
// Squares of numbers within 2^-kPlainExponent and 2^kPlainExponent, and sums of 2^64 of them, are normal numbers.
constexpr int kPlainExponent = 400;

// Vectors of 32 bytes: registers of AVX2, and pairs of registers elsewhere. GCC does not vectorize these loops by
// itself.
using Doubles = double __attribute__((vector_size(32)));
template <typename T>
struct VectorOf;
template <>
struct VectorOf<float> {
  using Values = float __attribute__((vector_size(32)));
  using Narrow = float __attribute__((vector_size(16)));  // as many as Doubles
  using Counts = std::int32_t __attribute__((vector_size(32)));
};
template <>
struct VectorOf<double> {
  using Values = Doubles;
  using Narrow = Doubles;
  using Counts = std::int64_t __attribute__((vector_size(32)));
};

template <typename T>
struct Pass {
  double sum = 0, squares = 0;
  T min = std::numeric_limits<T>::infinity(), max = -std::numeric_limits<T>::infinity();
  std::uint64_t zeros = 0;

  void add(T value) {
    const auto wide = static_cast<double>(value);
    sum += wide;
    squares += wide * wide;
    min = value < min ? value : min;
    max = value > max ? value : max;
    zeros += value == 0 ? 1 : 0;
  }
};

// Adds the numbers of complete vectors, and returns how many that were. Inlined into functions for several processors,
// which give the same bits.
template <typename T>
[[gnu::always_inline]] inline std::int64_t add_vectors(const T* values, std::int64_t count, Pass<T>& result) {
  using Values = typename VectorOf<T>::Values;
  constexpr int kLanes = sizeof(Values) / sizeof(T), kWide = sizeof(Doubles) / sizeof(double), kParts = kLanes / kWide;
  std::array<Doubles, kParts> sums{}, squares{};
  Values least = Values{} + result.min, most = Values{} + result.max;
  typename VectorOf<T>::Counts zeros{};
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    Values v;
    std::memcpy(&v, values + i, sizeof v);
    for (int part = 0; part < kParts; ++part) {
      typename VectorOf<T>::Narrow narrow;
      std::memcpy(&narrow, values + i + part * kWide, sizeof narrow);
      const Doubles wide = __builtin_convertvector(narrow, Doubles);
      sums[part] += wide;
      squares[part] += wide * wide;
    }
    least = v < least ? v : least;
    most = v > most ? v : most;
    zeros -= v == Values{};
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    result.sum += sums[lane / kWide][lane % kWide];
    result.squares += squares[lane / kWide][lane % kWide];
    result.min = std::min(result.min, static_cast<T>(least[lane]));
    result.max = std::max(result.max, static_cast<T>(most[lane]));
    result.zeros += static_cast<std::uint64_t>(zeros[lane]);
  }
  return i;
}

#if defined(__x86_64__)
template <typename T>
__attribute__((target("avx2"))) std::int64_t add_vectors_by_avx2(const T* values, std::int64_t count, Pass<T>& result) {
  return add_vectors(values, count, result);
}
#endif

// Of at most kSummaryBlock numbers. If any of them is not finite, `squares` is not finite and only `zeros` is right.
template <typename T>
Pass<T> first_pass(const T* values, std::int64_t count) {
  Pass<T> result;
  std::int64_t done = 0;
#if defined(__x86_64__)
  static const bool has_avx2 = __builtin_cpu_supports("avx2");
  done = has_avx2 ? add_vectors_by_avx2(values, count, result) : add_vectors(values, count, result);
#else
  done = add_vectors(values, count, result);
#endif
  for (std::int64_t i = done; i < count; ++i) result.add(values[i]);
  return result;
}

template <typename T>
double squared_distances(const T* values, std::int64_t count, double mean) {
  constexpr int kLanes = 8;
  std::array<double, kLanes> sums{};
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const double distance = static_cast<double>(values[i + lane]) - mean;
      sums[lane] += distance * distance;
    }
  }
  double result = 0;
  for (const double sum : sums) result += sum;
  for (; i < count; ++i) result += (static_cast<double>(values[i]) - mean) * (static_cast<double>(values[i]) - mean);
  return result;
}

// Returns the exponent that numbers up to `magnitude` are stored with.
int exponent_for(double magnitude) {
  if (magnitude == 0) return Moments::kOfZeros;
  const int exponent = std::ilogb(magnitude);
  return std::abs(exponent) < kPlainExponent ? 0 : exponent;
}

// Counts and removes what is not finite. Returns the number of values that remain.
template <typename T>
std::int64_t keep_finite(T* values, std::int64_t count, Summary& summary) {
  std::int64_t kept = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const T value = values[i];
    if (std::isfinite(value)) {
      values[kept++] = value;
    } else if (std::isnan(value)) {
      ++summary.nans;
    } else {
      ++(value > 0 ? summary.positive_infs : summary.negative_infs);
    }
  }
  return kept;
}

template <typename T>
Summary summarize_block(T* values, std::int64_t count) {
  Summary summary;
  Pass<T> pass = first_pass(values, count);
  if (!std::isfinite(pass.squares)) {
    count = keep_finite(values, count, summary);
    pass = first_pass(values, count);
  }
  summary.zeros = pass.zeros;
  if (count == 0) return summary;
  summary.min = static_cast<double>(pass.min) + 0.0;  // no negative zero
  summary.max = static_cast<double>(pass.max) + 0.0;
  Moments& moments = summary.finite;
  moments.count = static_cast<std::uint64_t>(count);
  moments.exponent = exponent_for(std::max(std::fabs(summary.min), std::fabs(summary.max)));
  if constexpr (std::is_same_v<T, double>) {
    if (moments.exponent != 0 && moments.exponent != Moments::kOfZeros) {
      for (std::int64_t i = 0; i < count; ++i) values[i] = std::ldexp(values[i], -moments.exponent);
      pass = first_pass(values, count);
    }
  }
  const auto n = static_cast<double>(count);
  moments.mean = pass.sum / n;
  // The difference loses at most a bit if it is at least half of the sum of squares. Otherwise a second pass is exact.
  moments.squares = pass.squares - moments.mean * pass.sum;
  if (moments.squares < 0.5 * pass.squares) moments.squares = squared_distances(values, count, moments.mean);
  return summary;
}

}  // namespace

void Moments::merge(const Moments& next) {
  if (next.count == 0) return;
  const int common = std::max(exponent, next.exponent);
  const auto scaled = [common](Moments moments) {
    if (moments.exponent == common || moments.exponent == kOfZeros) return moments;
    moments.mean = std::ldexp(moments.mean, moments.exponent - common);
    moments.squares = std::ldexp(moments.squares, 2 * (moments.exponent - common));
    return moments;
  };
  const Moments a = scaled(*this), b = scaled(next);
  const auto of_a = static_cast<double>(a.count), of_b = static_cast<double>(b.count), all = of_a + of_b;
  const double distance = b.mean - a.mean;
  count = a.count + b.count;
  mean = a.count == 0 ? b.mean : a.mean + distance * (of_b / all);
  squares = a.squares + b.squares + distance * distance * (of_a * (of_b / all));
  exponent = common;
}

double Moments::unscaled_mean() const { return std::ldexp(mean, exponent); }

double Moments::deviation() const {
  if (count < 2) return std::numeric_limits<double>::quiet_NaN();
  return std::ldexp(std::sqrt(squares / static_cast<double>(count - 1)), exponent);
}

double Moments::norm() const {
  return std::ldexp(std::sqrt(squares + static_cast<double>(count) * mean * mean), exponent);
}

void Summary::merge(const Summary& next) {
  finite.merge(next.finite);
  min = std::min(min, next.min);
  max = std::max(max, next.max);
  zeros += next.zeros;
  nans += next.nans;
  positive_infs += next.positive_infs;
  negative_infs += next.negative_infs;
}

template <typename T>
Summary summarize(T* values, std::int64_t count) {
  Summary all;
  for (std::int64_t done = 0; done < count; done += kSummaryBlock) {
    all.merge(summarize_block(values + done, std::min(kSummaryBlock, count - done)));
  }
  return all;
}
template Summary summarize<float>(float*, std::int64_t);
template Summary summarize<double>(double*, std::int64_t);

}  // namespace tessera::checkpoint
