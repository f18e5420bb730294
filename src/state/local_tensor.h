#pragma once
// A tensor of any kind as its full shape and the boxes that this rank holds.

#include <ATen/core/Tensor.h>

#include <optional>
#include <utility>
#include <vector>

#include "tessera/layout/box.h"
#include "tessera/layout/tensor_properties.h"
#include "tessera/state/value.h"

namespace tessera {

struct LocalTensor {
  std::optional<TensorProperties> properties;      // nullopt if not known, then without chunks
  std::vector<std::int64_t> shape;                 // of the full tensor
  std::vector<std::pair<Box, at::Tensor>> chunks;  // empty ones included
};

// Returns detached chunks; nothing if the value is not a tensor. Throws Error(unsupported) for a tensor that is not
// strided, for a dtype without a name in PyTorch, and for a nested sharded tensor.
std::optional<LocalTensor> local_tensor_of(const Value& value);
// As local_tensor_of, but with the chunks of the value itself, which may require grad, for access to their memory.
std::optional<LocalTensor> attached_tensor_of(const Value& value);

// Returns `state` with a tensor with memory, of undefined values, in place of each tensor or DTensor on meta, on the
// CPU or the device of the mesh; nothing if none is on meta. Throws Error(unsupported) naming the path of another
// tensor on meta.
std::optional<StateDict> with_memory(const StateDict& state);

// Throws Error(unsupported) for a tensor that has elements and no memory, as on meta.
void require_memory(const at::Tensor& tensor);

// Returns whether two elements share memory, as in an expanded tensor.
bool overlaps_itself(const at::Tensor& tensor);

}  // namespace tessera
