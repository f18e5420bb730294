#pragma once
// A state dict taken apart into values that an archive can hold, and tensors. What a rank has of a tensor that several
// ranks hold becomes its boxes; what is made of them again is a Checkpointable.

#include <ATen/core/Tensor.h>

#include <vector>

#include "state/local_tensor.h"
#include "tessera/base/function_ref.h"
#include "tessera/state/value.h"

namespace tessera {

// A value that is not a container, with its position among those of a state dict.
using MapLeaf = FunctionRef<Value(std::size_t position, const Path& path, const Value& leaf)>;
// Returns a copy of `state` with `map(leaf)` in place of each leaf, in order.
StateDict map_leaves(const StateDict& state, MapLeaf map);

// A tensor of a state dict: its position among the leaves, and what this rank has of it.
struct TensorLeaf {
  std::size_t position = 0;
  bool is_plain = true;
  LocalTensor local;
};

struct PortableState {
  StateDict state;  // None in place of each tensor
  std::vector<TensorLeaf> tensors;
};

// Shares elements with `state`. Throws as local_tensor_of, naming the path, and Error(unsupported) for a tensor
// without a memory.
PortableState take_apart(const StateDict& state);

// Returns the value of a tensor leaf: a tensor or a Checkpointable.
Value value_of(const TensorLeaf& leaf);

// Returns what describes the leaf, except its elements, and the inverse with undefined tensors as elements. Throws
// Error(corrupt), and Error(invalid_argument) for values of the wrong kinds.
Value describe(const TensorLeaf& leaf);
TensorLeaf described_leaf(const Value& description);

// Conversions of numbers to and from values.
List list_of(const std::vector<std::int64_t>& numbers);
std::vector<std::int64_t> numbers_of(const Value& list);

}  // namespace tessera
