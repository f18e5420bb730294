#pragma once
// Inputs that each rank brings, which must fit together before they are sent.

#include <ATen/core/Tensor.h>

#include <functional>
#include <string_view>
#include <vector>

#include "tessera/tensor/sharded_tensor.h"

namespace tessera::ops {

// `check` throws for what is wrong with this rank's inputs; then all ranks throw, naming it. Then all ranks' must have
// the same sizes and dtypes, or all throw Error(invalid_argument) naming two that differ. Undefined tensors are inputs
// as well.
void agree_on_inputs(std::string_view op, const ProcessGroup& group, const std::vector<at::Tensor>& inputs,
                     const std::function<void()>& check);

}  // namespace tessera::ops
