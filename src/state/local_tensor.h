#pragma once
// A tensor of any kind as boxes of which this rank has the elements.

#include <ATen/core/Tensor.h>

#include <optional>
#include <utility>
#include <vector>

#include "tessera/layout/box.h"
#include "tessera/layout/tensor_properties.h"
#include "tessera/state/value.h"

namespace tessera {

struct LocalTensor {
  TensorProperties properties;
  std::vector<std::int64_t> shape;                 // of the whole tensor
  std::vector<std::pair<Box, at::Tensor>> chunks;  // detached; empty ones included
};

// Nothing if the value is no tensor. Throws Error(unsupported) for one that isn't strided, for a dtype that PyTorch has
// no name for, and for a nested sharded tensor.
std::optional<LocalTensor> local_tensor_of(const Value& value);

// A flat state dict with its nested sharded tensors taken apart, which leaves out those of which this rank has nothing.
StateDict without_nested(StateDict flat, const ProcessGroup& group);

// Whether two elements share memory (an expanded tensor).
bool overlaps_itself(const at::Tensor& tensor);

}  // namespace tessera
