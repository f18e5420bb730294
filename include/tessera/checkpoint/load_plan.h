#pragma once
/// \file
/// A rank's load plan: which parts of which stored chunks fill the targets that the rank requests.
///
/// Law: the boxes of a plan's items for one target chunk partition that chunk.
/// PyTorch: torch/distributed/checkpoint/planner.py (LoadPlan, ReadItem), planner_helpers.py.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "tessera/base/function_ref.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/layout/box.h"

namespace tessera::checkpoint {

/// The destination of a chunk's elements: element x goes to data + sum(x[d] * strides[d]) * element size. Owned by the
/// caller. A destination that is not in host memory, such as a GPU's, takes the elements by a function in parts.
struct TargetMemory {
  std::uint8_t* data = nullptr;
  std::vector<std::int64_t> strides;  ///< in elements, >= 0; empty for row-major
  /// If set, it is called instead of writing to `data`, from several threads. The parts of the calls partition the
  /// chunk's box and have a few MiB at most. It must call `fill` once with memory for the elements of `part`, in
  /// row-major order, and then store them. If `fill` throws, it must store nothing and let the exception pass.
  std::function<void(BoxView part, FunctionRef<void(std::uint8_t* row_major)> fill)> store = nullptr;
};

struct TargetChunk {
  Box box;  ///< in the full tensor
  TargetMemory memory;
};

struct TargetTensor {
  DType dtype = DType::float32;     ///< of the chunks
  std::vector<std::int64_t> shape;  ///< of the full tensor
  std::vector<TargetChunk> chunks;  ///< requested by this rank; disjoint, but may overlap other ranks' chunks
};

struct TargetObject {};

struct TargetEntry {
  std::string name;
  std::variant<TargetTensor, TargetObject> value;
};

using Targets = std::vector<TargetEntry>;

/// Elements to copy from a stored chunk to a chunk of a target.
struct ReadItem {
  std::uint32_t target = 0, target_chunk = 0;
  std::uint32_t tensor = 0, stored_chunk = 0;  ///< in the checkpoint
  Box box;                                     ///< in the full tensor, never empty
  bool operator==(const ReadItem&) const = default;
};

struct LoadPlan {
  struct ObjectItem {
    std::uint32_t target = 0;
    std::size_t object = 0;  ///< in the checkpoint
    bool operator==(const ObjectItem&) const = default;
  };
  std::vector<ReadItem> items;  ///< sorted by target, target chunk, stored chunk
  std::vector<ObjectItem> objects;
  std::vector<std::string> missing;  ///< target names that the checkpoint does not have
};

struct LoadRules {
  bool allow_partial = false;  ///< leave targets unchanged that the checkpoint does not have
  bool allow_cast = false;     ///< cast floating-point elements of another dtype; see base/cast.h
  /// If set, a floating-point tensor "x" of two dimensions for which the checkpoint has "x_scale_inv" is dequantized:
  /// each element is multiplied by the scale of its block, in float32, and cast to the target's floating-point dtype.
  /// Blocks have this many rows and columns, fewer at the end; the scales have one element for each. Scales that are
  /// requested themselves are loaded as they are. PyTorch: QuantizedHuggingFaceStorageReader.
  std::optional<std::int64_t> dequantize_block_size = std::nullopt;
};

/// Plans how to fill `targets`. Throws `Error(not_found)` for names that the checkpoint does not have, unless
/// `allow_partial`. Throws `Error(invalid_argument)` for targets whose shape or dtype differs or that are a tensor on
/// one side and an object on the other, and for scales of another shape than the blocks. One message names all of them,
/// up to a limit. Throws `Error(corrupt)` if the stored chunks of a requested tensor, or of its scales, do not
/// partition it.
LoadPlan make_load_plan(const Targets& targets, const Checkpoint& checkpoint, const LoadRules& rules = {});

}  // namespace tessera::checkpoint
