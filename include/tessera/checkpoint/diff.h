#pragma once
/// \file
/// Whether two checkpoints, of any formats and layouts, hold the same state, and where they first differ.

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
  enum class Kind : std::uint8_t { only_in_a, only_in_b, dtype, shape, elements, object, kind };
  Kind kind = Kind::elements;
  std::string name;
  std::string a, b;                      ///< what each side has, for people
  std::vector<std::int64_t> index;       ///< of the first element that differs, row-major order
  std::uint64_t differing_elements = 0;  ///< in that tensor
};
std::string to_string(const Difference& difference);

struct DiffOptions {
  Selection selection;
  std::size_t jobs = 0;
  ProgressSink* progress = nullptr;
  const Cancellation* cancellation = nullptr;
};

struct DiffReport {
  std::vector<Difference> differences;     ///< by name
  std::uint64_t tensors = 0, objects = 0;  ///< compared
  std::uint64_t bytes = 0;                 ///< compared
  bool same() const { return differences.empty(); }
};

/// Compares names, dtypes, shapes and every element (by bits), and objects by value. Chunks, order and requires_grad
/// don't count.
DiffReport diff(const std::shared_ptr<const Checkpoint>& a, const std::shared_ptr<const Checkpoint>& b,
                const DiffOptions& options = {});

/// One element as text: "1.5", "(1-2j)", "0x3f" for types that have no numbers of their own.
std::string element_to_string(DType dtype, const std::uint8_t* element);

}  // namespace tessera::checkpoint
