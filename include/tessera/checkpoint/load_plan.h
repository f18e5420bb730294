#pragma once
/// \file
/// What a rank wants of a checkpoint, and which stored pieces that takes.
///
/// Law: the boxes of a plan's items for one destination chunk partition that chunk.
/// PyTorch: torch/distributed/checkpoint/planner.py (LoadPlan, ReadItem), planner_helpers.py.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/layout/box.h"

namespace tessera::checkpoint {

/// Where elements go: element x of a chunk to data + sum(x[d] * strides[d]) * element size. Owned by the caller.
struct TargetMemory {
  std::uint8_t* data = nullptr;
  std::vector<std::int64_t> strides;  ///< in elements, >= 0; empty: row-major
};

struct TargetChunk {
  Box box;  ///< in the whole tensor
  TargetMemory memory;
};

struct TargetTensor {
  DType dtype = DType::float32;
  std::vector<std::int64_t> shape;  ///< of the whole tensor
  std::vector<TargetChunk> chunks;  ///< those that this rank wants; they may overlap other ranks', not each other
};

struct TargetObject {};

struct TargetEntry {
  std::string name;
  std::variant<TargetTensor, TargetObject> value;
};

using Targets = std::vector<TargetEntry>;

/// Elements of a stored chunk that go to a chunk of a target.
struct ReadItem {
  std::uint32_t target = 0, target_chunk = 0;
  std::uint32_t tensor = 0, stored_chunk = 0;  ///< of the checkpoint
  Box box;                                     ///< in the whole tensor, never empty
  bool operator==(const ReadItem&) const = default;
};

struct LoadPlan {
  struct ObjectItem {
    std::uint32_t target = 0;
    std::size_t object = 0;  ///< of the checkpoint
    bool operator==(const ObjectItem&) const = default;
  };
  std::vector<ReadItem> items;  ///< by target, then by its chunk, then by stored chunk
  std::vector<ObjectItem> objects;
  std::vector<std::string> missing;  ///< names that the checkpoint hasn't
};

struct LoadRules {
  bool allow_partial = false;  ///< names that the checkpoint hasn't are left as they are
  bool allow_cast = false;     ///< floating-point elements of another dtype are converted; see base/cast.h
};

/// Throws `Error(not_found)` for a name that the checkpoint hasn't, and `Error(invalid_argument)` for a tensor of
/// another shape or dtype or that is an object there (or the other way round), all of them in one message; and
/// `Error(corrupt)` for a tensor that is wanted and whose stored chunks don't partition it.
LoadPlan make_load_plan(const Targets& targets, const Checkpoint& checkpoint, const LoadRules& rules = {});

}  // namespace tessera::checkpoint
