#pragma once
// Local tensors on ranks outside of a mesh.

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/real.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "tessera/layout/placement.h"

namespace tessera {

// Returns the fewest dimensions of a tensor with these placements: those of a DTensor whose size is not known on a rank
// outside of its mesh.
inline std::size_t dims_for(const Placements& placements) {
  std::int64_t dims = 0;
  for (const Placement& placement : placements) {
    if (placement.is_shard()) dims = std::max({dims, placement.dim() + 1, -placement.dim()});
  }
  return static_cast<std::size_t>(dims);
}

// Returns the local tensor of a DTensor of `size`: 0 for a tensor of one number, else no elements. If its dtype has
// gradients, autograd tracks it as a result of all `inputs` that it tracks, so that ranks outside of the mesh may call
// backward() as the others do. PyTorch: default_tensor in torch/distributed/tensor/_dispatch.py, below autograd.
inline at::Tensor local_outside(const std::vector<std::int64_t>& size, const at::TensorOptions& options,
                                const std::vector<at::Tensor>& inputs = {}) {
  const at::ScalarType dtype = c10::typeMetaToScalarType(options.dtype());
  const bool is_complex = at::isComplexType(dtype);
  at::Tensor tracked;
  for (const at::Tensor& input : inputs) {
    if (!input.requires_grad() || !(is_complex || at::isFloatingType(dtype))) continue;
    const at::Tensor none = input.flatten().narrow(0, 0, 0);
    // In a dtype that has sums, which 8-bit floating-point numbers do not.
    const at::Tensor sum = (is_complex || !none.is_complex() ? none : at::real(none))
                               .to(options.dtype(is_complex ? at::kComplexFloat : at::kFloat))
                               .sum();
    tracked = tracked.defined() ? tracked + sum : sum;
  }
  if (!tracked.defined()) return size.empty() ? at::zeros({}, options) : at::empty({0}, options);
  tracked = tracked.to(dtype);
  return size.empty() ? tracked : tracked.flatten().narrow(0, 0, 0);
}

}  // namespace tessera
