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

struct Difference {
  enum class Kind : std::uint8_t { only_in_a, only_in_b, dtype, shape, elements, object, kind, metadata };
  Kind kind = Kind::elements;
  std::string name;                      ///< of the tensor or object; the key for Kind::metadata
  std::string a, b;                      ///< the value on each side, as text for users
  std::vector<std::int64_t> index;       ///< of the first differing element in row-major order
  std::uint64_t differing_elements = 0;  ///< in that tensor
};
/// Returns one line that describes `difference`.
std::string to_string(const Difference& difference);

struct DiffOptions {
  Selection selection;
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

/// Compares names, dtypes, shapes, every element bit by bit, objects by value, and of two safetensors checkpoints all
/// `__metadata__` but `format`. Ignores chunks, order and requires_grad. Throws `Error`: corrupt, io, cancelled.
DiffReport diff(const std::shared_ptr<const Checkpoint>& a, const std::shared_ptr<const Checkpoint>& b,
                const DiffOptions& options = {});

/// Returns one element as text: "1.5", "(1-2j)"; for dtypes without a numeric value, the bits: "0x3f".
std::string element_to_string(DType dtype, const std::uint8_t* element);

}  // namespace tessera::checkpoint
