#pragma once
// Differentiable linear functions of one tensor.

#include <ATen/core/Tensor.h>

#include <functional>

#include "tessera/base/function_ref.h"

namespace tessera::comm {

// Returns forward(input), with `backward` mapping the gradient of the result to that of `input`. `forward` runs without
// recording gradients. `backward` records them if the pass creates a graph: for second derivatives, it must be
// differentiable itself.
at::Tensor linear(const at::Tensor& input, FunctionRef<at::Tensor(const at::Tensor&)> forward,
                  std::function<at::Tensor(const at::Tensor&)> backward);

}  // namespace tessera::comm
