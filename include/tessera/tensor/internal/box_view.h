#pragma once
// The part of a tensor that is in a box.

#include <ATen/core/Tensor.h>

#include "tessera/layout/box.h"

namespace tessera {

// A view; the box's offsets count from the tensor's begin.
inline at::Tensor box_view(at::Tensor tensor, BoxView box) {
  for (std::size_t d = 0; d < box.rank(); ++d) {
    tensor = tensor.narrow(static_cast<std::int64_t>(d), box.offsets[d], box.sizes[d]);
  }
  return tensor;
}

// The same for a tensor that is itself the part of a larger one in `of`.
inline at::Tensor box_view(at::Tensor tensor, BoxView of, BoxView box) {
  for (std::size_t d = 0; d < box.rank(); ++d) {
    tensor = tensor.narrow(static_cast<std::int64_t>(d), box.offsets[d] - of.offsets[d], box.sizes[d]);
  }
  return tensor;
}

}  // namespace tessera
