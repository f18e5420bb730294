#pragma once
// Views of the part of a tensor inside a box.

#include <ATen/core/Tensor.h>

#include "tessera/layout/box.h"

namespace tessera {

// The box's offsets are relative to the tensor.
inline at::Tensor box_view(at::Tensor tensor, BoxView box) {
  for (std::size_t d = 0; d < box.rank(); ++d) {
    tensor = tensor.narrow(static_cast<std::int64_t>(d), box.offsets[d], box.sizes[d]);
  }
  return tensor;
}

// The tensor is itself the part in box `of` of a larger one, to which the offsets of both boxes are relative.
inline at::Tensor box_view(at::Tensor tensor, BoxView of, BoxView box) {
  for (std::size_t d = 0; d < box.rank(); ++d) {
    tensor = tensor.narrow(static_cast<std::int64_t>(d), box.offsets[d] - of.offsets[d], box.sizes[d]);
  }
  return tensor;
}

}  // namespace tessera
