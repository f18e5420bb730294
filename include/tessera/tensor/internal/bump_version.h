#pragma once
/// \file
/// Versions of tensors, which LibTorch's functions count.

#include <ATen/core/Tensor.h>

namespace tessera {

/// Notes that the elements were changed through a pointer, for autograd and for FSDP, which compare versions.
inline void bump_version(const at::Tensor& tensor) {
  if (tensor.defined() && !tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

}  // namespace tessera
