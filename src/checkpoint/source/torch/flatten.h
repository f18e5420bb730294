#pragma once
// Flattens the nested state of a torch.save archive to leaves with paths, by the rules of PyTorch's DCP.
// PyTorch: torch/distributed/checkpoint/_traverse.py, _nested_dict.py.

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <unordered_set>

#include "checkpoint/source/expansion.h"
#include "tessera/base/function_ref.h"
#include "tessera/base/internal/text_hash.h"
#include "tessera/base/state_path.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/format/internal/repeated_parts.h"
#include "tessera/format/pickle_value.h"

namespace tessera::checkpoint {

// The keys and indices of a path, with dots between them: the name that DCP gives to a leaf.
std::string name_of_path(const Path& path);

// Where a value is: TensorInfo::path and keys.
struct LeafPlace {
  Path path;
  std::shared_ptr<const PathKeys> keys = nullptr;
};

// Law: where a container is flattened first, each value in it takes at least one byte of the file. So kOwnBytes for
// each of them are a constant times the file, and free. A file can repeat everything else at the cost of few bytes, so
// it is charged to the budget:
// - what a value takes beyond kOwnBytes, because of the names of the containers around it
// - what the values of a container take where it occurs again
// - the parts of keys that occur again, before anything walks through the key
// - the dimensions of tensors
class StateFlattener {
 public:
  // What a leaf with a short name takes, a few containers deep.
  static constexpr std::uint64_t kOwnBytes = 512;

  // Whether tuples are flattened as lists are.
  enum class Tuples : std::uint8_t { are_leaves, are_flattened };
  using Leaf = FunctionRef<void(pickle::NodeRef value, const LeafPlace& at)>;

  // `where` is for messages. `budget` must outlive this.
  StateFlattener(std::string where, ExpansionBudget& budget, Tuples tuples)
      : where_(std::move(where)), tuples_(tuples), budget_(budget) {}

  // Whether a value is flattened: a mapping, or a list that contains a tensor or a mapping.
  bool is_container(pickle::NodeRef value) { return !is_terminal(value, 0); }
  // Calls `leaf` for each leaf of `value`, which is at `at`. Throws Error(unsupported) for deep nesting, and
  // Error(corrupt) if the budget does not allow what is repeated.
  void flatten(pickle::NodeRef value, const LeafPlace& at, Leaf leaf) { flatten(value, at, leaf, 0, false); }
  // Must be called by `leaf` for a tensor whose sizes and strides were copied. A pickle can define a tensor once and
  // refer to it often.
  void charge_tensor(std::size_t dimensions) { charge(kBytesPerDimension * dimensions); }

 private:
  static constexpr std::uint64_t kBytesPerDimension = 6 * sizeof(std::int64_t);  // shape, a box, strides; copies
  // `occurs_again` is whether the container of `value` was flattened before.
  void flatten(pickle::NodeRef value, const LeafPlace& at, Leaf leaf, std::size_t depth, bool occurs_again);
  LeafPlace at_key(const LeafPlace& at, pickle::NodeRef key);
  bool is_sequence(pickle::NodeRef value) const;
  bool is_terminal(pickle::NodeRef value, std::size_t depth);
  void check_depth(std::size_t depth) const;
  void charge(const LeafPlace& at, bool occurs_again);
  void charge(std::uint64_t bytes);

  std::string where_;
  Tuples tuples_;
  ExpansionBudget& budget_;
  std::unordered_map<std::uint64_t, bool, NumberHash> terminal_;  // of sequences
  std::unordered_set<std::uint64_t, NumberHash> flattened_;       // containers
  pickle::RepeatedParts key_parts_;
};

}  // namespace tessera::checkpoint
