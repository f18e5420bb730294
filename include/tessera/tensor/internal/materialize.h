#pragma once
// Memory for tensors on meta, in place.

#include <ATen/core/Tensor.h>

#include <string_view>

namespace tessera {

// Throws Error(unsupported) unless the tensor on meta is strided and not quantized, and Error(invalid_argument) unless
// it is a leaf.
void check_can_materialize(const at::Tensor& meta, std::string_view operation);

// Allocates memory on `device` for a tensor on meta that check_can_materialize accepts. The tensor keeps its identity,
// so all references to it see the change. Its values are undefined and its gradient is reset.
void materialize_in_place(const at::Tensor& meta, at::Device device);

}  // namespace tessera
