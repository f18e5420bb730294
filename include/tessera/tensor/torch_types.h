#pragma once
/// \file
/// Between LibTorch's dtypes and devices and those of the torch-free modules.

#include <ATen/core/Tensor.h>

#include <optional>

#include "tessera/base/dtype.h"
#include "tessera/layout/remote_device.h"
#include "tessera/layout/tensor_properties.h"

namespace tessera {

/// Throws `Error(unsupported)` for a dtype that the LibTorch here hasn't.
at::ScalarType to_scalar_type(DType dtype);
/// Throws `Error(unsupported)` for one that PyTorch has no name for.
DType to_dtype(at::ScalarType type);

at::Device to_device(const Device& device);
Device to_device(const at::Device& device);

/// Of a tensor as it is; its memory format counts as contiguous. PyTorch: TensorProperties.create_from_tensor.
TensorProperties properties_of(const at::Tensor& tensor);

/// std::optional, and c10::optional before LibTorch 2.5.
using OptionalDevice = decltype(std::declval<const at::TensorOptions&>().device_opt());

}  // namespace tessera
