#pragma once
/// \file
/// Comparison of the state of two checkpoints of any formats and layouts.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/base/cancellation.h"
#include "tessera/base/progress.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/convert.h"

namespace tessera::checkpoint {

/// The element of a tensor with the largest difference.
struct WorstElement {
  double value = 0;  ///< the difference
  std::vector<std::int64_t> index;
  std::string a, b;  ///< the element on each side, as text for users
};

struct Difference {
  enum class Kind : std::uint8_t { only_in_a, only_in_b, dtype, shape, elements, object, kind, metadata };
  Kind kind = Kind::elements;
  std::string name;                      ///< of the tensor or object; the key for Kind::metadata
  std::string a, b;                      ///< the value on each side, as text for users
  std::vector<std::int64_t> index;       ///< of the first differing element in row-major order
  std::uint64_t differing_elements = 0;  ///< in that tensor
  std::uint64_t elements = 0;            ///< of that tensor
  /// Among the differing elements, those with the largest |a - b| and the largest |a - b| / |b|; of equal ones the
  /// first. Both are computed in float64, and are infinite where one side alone is NaN or infinite, and 0 where both
  /// are NaN. Empty if no element differs, or if elements are not single numbers (`bits8`, `float4_e2m1fn_x2`).
  std::optional<WorstElement> worst_absolute = std::nullopt, worst_relative = std::nullopt;
};
/// Returns one line that describes `difference`.
std::string to_string(const Difference& difference);

/// The tolerance of a comparison by value. Two elements are equal if |a - b| <= atol + rtol * |b|, or if both are the
/// same infinity, as in `torch.allclose`. Values are widened to float64 before they are compared, whatever their
/// dtypes; integers of 64 bits are compared with each other exactly. Complex numbers differ by the magnitude of their
/// difference.
struct Tolerance {
  double atol = 0, rtol = 0;  ///< finite and not negative
  bool equal_nan = false;     ///< whether NaN equals NaN
};

struct DiffOptions {
  Selection selection;
  /// If set, elements are compared by value, and two dtypes of real numbers, or of complex ones, do not count as a
  /// difference. If not, elements are compared bit by bit.
  std::optional<Tolerance> tolerance;
  bool expand = false;  ///< as ConvertOptions::expand
  std::size_t jobs = 0;
  ProgressSink* progress = nullptr;
  const Cancellation* cancellation = nullptr;
};

struct DiffReport {
  std::vector<Difference> differences;     ///< sorted by name
  std::uint64_t tensors = 0, objects = 0;  ///< compared
  std::uint64_t bytes = 0;                 ///< compared
  bool same() const { return differences.empty(); }
};

/// Compares names, dtypes, shapes, every element, objects by value, and of two safetensors checkpoints all
/// `__metadata__` but `format`. Ignores chunks, order and requires_grad. The report does not depend on the number of
/// threads. Throws `Error`: corrupt, io, cancelled; unsupported for elements that are repeated too often (see
/// `expand`); invalid_argument for a tolerance that is negative or not finite.
DiffReport diff(const std::shared_ptr<const Checkpoint>& a, const std::shared_ptr<const Checkpoint>& b,
                const DiffOptions& options = {});

/// Returns one element as text: "1.5", "(1-2j)"; for dtypes without a numeric value, the bits: "0x3f".
std::string element_to_string(DType dtype, const std::uint8_t* element);

}  // namespace tessera::checkpoint
