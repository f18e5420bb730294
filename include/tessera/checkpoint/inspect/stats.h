#pragma once
/// \file
/// Statistics of the elements of tensors: range, moments, norm, and counts of zeros, NaN and infinities.
///
/// Law: the results depend on the dtype, the shape and the elements alone. They have the same bits whatever the number
/// of threads and however the tensor is divided into chunks and files.
///
/// Which numbers an element is:
/// - A floating-point element, float8 and float4 types included, is its value, widened without loss to float64. A
///   byte of float4_e2m1fn_x2 is two numbers.
/// - An integer is its value, and a bool is 0 or 1. `min` and `max` are exact; the other statistics are those of the
///   integers rounded to float64.
/// - A complex element counts once. It is zero if both parts are, NaN if either is, and else infinite if either is.
///   `mean` is complex, `stddev` is the root of the mean squared distance from it, `norm` is that of the magnitudes,
///   and there are no `min` and `max`.
/// - Other dtypes (`quint8`, `bits8`, `uint4`, ...) have no number for an element: only their size is reported.
/// Elements that are quantized in blocks are the stored ones, as in `convert`: scales are tensors of their own.
///
/// NaNs are counted and are in no other statistic. Infinities are in all of them, with the results of IEEE 754: `min`
/// or `max` is infinite, `mean` is infinite or, with both signs, NaN, `stddev` is NaN and `norm` is infinite.

#include <complex>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "tessera/base/cancellation.h"
#include "tessera/base/progress.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/convert.h"

namespace tessera::checkpoint {

/// A number in the type that represents it exactly.
using Number = std::variant<double, std::int64_t, std::uint64_t, std::complex<double>>;
/// Returns the shortest text that gives the number back: "0.1", "-3", "inf", "(1-2j)".
std::string to_string(const Number& number);

struct TensorStats {
  std::string name;
  DType dtype = DType::float32;
  std::vector<std::int64_t> shape;
  std::uint64_t size_bytes = 0;
  bool is_numeric = true;      ///< whether the elements are numbers; the members below are empty or 0 if they are not
  std::uint64_t elements = 0;  ///< numbers, NaN included
  std::uint64_t nans = 0, infs = 0, zeros = 0;
  std::optional<Number> min = std::nullopt, max = std::nullopt;  ///< empty if all elements are NaN, or there are none
  std::optional<Number> mean = std::nullopt;                     ///< likewise
  std::optional<double> stddev =
      std::nullopt;                           ///< of a sample (n - 1), as torch.std; empty for fewer than two elements
  std::optional<double> norm = std::nullopt;  ///< L2; empty only if `is_numeric` is false
};

struct StatsReport {
  std::vector<TensorStats> tensors;
  std::uint64_t bytes = 0, elements = 0, nans = 0, infs = 0, zeros = 0;  ///< of all of them
  double norm = 0;                                                       ///< of all elements that are not NaN
};

struct StatsOptions {
  Selection selection;
  /// If set, only these of the selected tensors: indices into Checkpoint::tensors(), ascending.
  std::optional<std::vector<std::size_t>> tensors;
  bool expand = false;   ///< as ConvertOptions::expand
  std::size_t jobs = 0;  ///< threads; 0: one per processor, at least 4, at most 16
  ProgressSink* progress = nullptr;
  const Cancellation* cancellation = nullptr;
};

/// Computes the statistics of each selected tensor, in the checkpoint's order. Reads every byte once and compares it
/// with its checksum. Memory: that of `jobs` pieces of 1 MiB, and the report. Throws `Error`: corrupt, io, cancelled,
/// and unsupported as `convert` for elements that are repeated too often.
StatsReport stats(const std::shared_ptr<const Checkpoint>& checkpoint, const StatsOptions& options = {});

/// What tensors can be sorted by.
enum class StatsKey : std::uint8_t { name, size, min, max, mean, stddev, norm, zeros, nan, inf };
/// Returns the key of a name: "name", "size", "min", "max", "mean", "std", "norm", "zeros", "nan", "inf".
std::optional<StatsKey> find_stats_key(std::string_view name);
/// Sorts by `key`: names and `min` ascending, everything else descending, complex numbers by their magnitude. NaN and
/// what a tensor does not have are last. Equal ones are sorted by name.
void sort_stats(std::vector<TensorStats>& tensors, StatsKey key);

}  // namespace tessera::checkpoint
