#pragma once
/// \file
/// Conversions between the dtypes and devices of LibTorch and those of the torch-free modules.

#include <ATen/core/Tensor.h>

#include <optional>

#include "tessera/base/dtype.h"
#include "tessera/layout/remote_device.h"
#include "tessera/layout/tensor_properties.h"

namespace tessera {

/// Returns the type of LibTorch. Throws `Error(unsupported)` for a dtype that this version of LibTorch does not have.
at::ScalarType to_scalar_type(DType dtype);
/// Returns the dtype of tessera. Throws `Error(unsupported)` for a type that PyTorch has no name for.
DType to_dtype(at::ScalarType type);

/// Return the same device in the other form: LibTorch's, or that of tessera/layout/remote_device.h.
at::Device to_device(const Device& device);
Device to_device(const at::Device& device);

/// Returns the properties of a tensor; the memory format is always contiguous. PyTorch:
/// TensorProperties.create_from_tensor.
TensorProperties properties_of(const at::Tensor& tensor);

/// std::optional; before LibTorch 2.5, c10::optional.
using OptionalDevice = decltype(std::declval<const at::TensorOptions&>().device_opt());

}  // namespace tessera
