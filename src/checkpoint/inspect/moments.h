#pragma once
// Moments of numbers in one pass, without overflow and without cancellation.

#include <cstdint>
#include <limits>
#include <vector>

namespace tessera::checkpoint {

// The mean of some finite numbers and the sum of their squared distances from it, both of the numbers times
// 2^-exponent. The exponent is 0 unless squares of the numbers leave the range of float64.
struct Moments {
  static constexpr int kOfZeros = -2000;  // the exponent if all numbers are zero: any other one fits, too
  std::uint64_t count = 0;
  double mean = 0, squares = 0;
  int exponent = kOfZeros;

  // Adds numbers that follow. The result depends on the order of all additions, up to rounding.
  // Chan, Golub, LeVeque: Updating Formulae and a Pairwise Algorithm for Computing Sample Variances, 1979.
  void merge(const Moments& next);
  double unscaled_mean() const;
  // Of a sample; NaN for fewer than two numbers.
  double deviation() const;
  // The root of the sum of the squared numbers.
  double norm() const;
};

// What is known of a list of real numbers.
struct Summary {
  Moments finite;
  double min = std::numeric_limits<double>::infinity(), max = -std::numeric_limits<double>::infinity();  // of finite
  std::uint64_t zeros = 0, nans = 0, positive_infs = 0, negative_infs = 0;

  void merge(const Summary& next);
};

// Summarizes `count` numbers, which may be changed. T is float or double. Vectorized.
template <typename T>
Summary summarize(T* values, std::int64_t count);
extern template Summary summarize<float>(float*, std::int64_t);
extern template Summary summarize<double>(double*, std::int64_t);

}  // namespace tessera::checkpoint
