#pragma once
// Local tensors on ranks outside of a mesh.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/real.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>

#include <cstdint>
#include <vector>

namespace tessera {

// Returns the local tensor of a DTensor of `size`: 0 for a tensor of one number, else no elements. PyTorch:
// default_tensor in torch/distributed/tensor/_dispatch.py.
inline at::Tensor local_outside(const std::vector<std::int64_t>& size, const at::TensorOptions& options) {
  return size.empty() ? at::zeros({}, options) : at::empty({0}, options);
}

// Returns the local tensor of the result of an op, whose input has the local tensor `of_input`. Autograd tracks it as
// it does the input, so that ranks outside of the mesh may call backward() as the others do.
inline at::Tensor local_outside(const std::vector<std::int64_t>& size, const at::Tensor& of_input) {
  if (size.empty() == (of_input.dim() == 0)) return of_input;
  return size.empty() ? at::sum(of_input, of_input.scalar_type()) : of_input.flatten().narrow(0, 0, 0);
}

// The same for a result of another dtype.
inline at::Tensor local_outside(const std::vector<std::int64_t>& size, const at::Tensor& of_input,
                                at::ScalarType dtype) {
  const at::Tensor local = local_outside(size, of_input);
  return (at::isComplexType(dtype) || !local.is_complex() ? local : at::real(local)).to(dtype);
}

}  // namespace tessera
