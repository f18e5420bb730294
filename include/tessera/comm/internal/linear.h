#pragma once
// Linear functions of one tensor, for autograd.

#include <ATen/core/Tensor.h>

#include <functional>

namespace tessera::comm {

// forward(input); of its gradient `backward` makes that of `input`. Both run without gradients of their own.
at::Tensor linear(const at::Tensor& input, const std::function<at::Tensor(const at::Tensor&)>& forward,
                  std::function<at::Tensor(const at::Tensor&)> backward);

}  // namespace tessera::comm
