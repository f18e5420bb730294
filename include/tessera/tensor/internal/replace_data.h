#pragma once
// Replacement of a tensor's data on another device.

#include <ATen/core/Tensor.h>

namespace tessera {

// Gives `tensor`, a leaf, the data of `data` and drops its gradient: Tensor::set_data, which does not support a change
// from meta to another device.
void replace_data(const at::Tensor& tensor, const at::Tensor& data);

}  // namespace tessera
