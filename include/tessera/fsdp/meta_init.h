#pragma once
/// \file
/// Models whose parameters have no memory yet.

#include <ATen/core/Tensor.h>

namespace tessera::fsdp {

/// Gives a tensor on meta memory on `device`, uninitialised, for all who hold it.
void materialize(at::Tensor& meta, at::Device device);

}  // namespace tessera::fsdp
