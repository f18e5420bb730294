#pragma once
// Checks of inputs that each rank passes, before anything is sent.

#include <ATen/core/Tensor.h>

#include <functional>
#include <string_view>
#include <vector>

#include "tessera/tensor/sharded_tensor.h"

namespace tessera::ops {

// Checks that inputs are valid and agree between ranks. If `check`, which validates this rank's inputs, throws on any
// rank, every rank throws its error. If the ranks' inputs differ in sizes or dtypes, every rank throws
// Error(invalid_argument) naming two that differ. Inputs may be undefined. A collective.
void agree_on_inputs(std::string_view op, const ProcessGroup& group, const std::vector<at::Tensor>& inputs,
                     const std::function<void()>& check);

}  // namespace tessera::ops
