#pragma once
// Copies between strided views of tensors.

#include <ATen/core/Tensor.h>

#include "tessera/layout/byte_ranges.h"

namespace tessera {

// As to.copy_(from), for tensors of one size and dtype that do not overlap and need no gradient. On CPU, copies runs of
// bytes; at::Tensor::copy_ copies by element if a view is not contiguous.
inline void copy_elements(const at::Tensor& to, const at::Tensor& from) {
  if (!to.is_cpu() || !from.is_cpu()) {
    to.copy_(from);
    return;
  }
  copy_strided(from.sizes(), static_cast<std::int64_t>(from.element_size()),
               static_cast<const std::uint8_t*>(from.data_ptr()), from.strides(),
               static_cast<std::uint8_t*>(to.data_ptr()), to.strides());
}

}  // namespace tessera
