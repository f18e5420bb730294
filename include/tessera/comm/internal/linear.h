#pragma once
// Differentiable linear functions of one tensor.

#include <ATen/core/Tensor.h>

#include <functional>

namespace tessera::comm {

// Returns forward(input), with `backward` mapping the gradient of the result to that of `input`. Both run without
// recording gradients.
at::Tensor linear(const at::Tensor& input, const std::function<at::Tensor(const at::Tensor&)>& forward,
                  std::function<at::Tensor(const at::Tensor&)> backward);

}  // namespace tessera::comm
