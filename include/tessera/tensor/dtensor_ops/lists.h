#pragma once
/// \file
/// Ops on lists of DTensors. PyTorch: `_foreach_*`.
///
/// `foreach_f(xs, ...)` is f of each tensor; a second list has as many tensors as the first, else they throw
/// `Error(invalid_argument)`. The second list may hold plain tensors, which count as replicated (see AnyTensor), among
/// DTensors. Tensors of a list may be on different meshes; f's tensors must be on one. Unlike a loop, the norms and
/// extremes of tensors with equal placements on a mesh are reduced by one collective for all of them.
///
/// All ranks of the meshes call them with lists of the same tensors in the same order. They throw as the ops on
/// DTensors.

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <utility>
#include <vector>

#include "tessera/base/function_ref.h"
#include "tessera/tensor/dtensor.h"
#include "tessera/tensor/dtensor_ops.h"

namespace tessera::dtensor {

/// A list of DTensors, of plain tensors, or of both.
class AnyTensors {
 public:
  AnyTensors(std::vector<AnyTensor> tensors) : tensors_(std::move(tensors)) {}  // NOLINT(google-explicit-constructor)
  AnyTensors(std::initializer_list<AnyTensor> tensors) : tensors_(tensors) {}
  AnyTensors(const std::vector<DTensor>& tensors)  // NOLINT(google-explicit-constructor)
      : tensors_(tensors.begin(), tensors.end()) {}
  AnyTensors(const std::vector<at::Tensor>& tensors)  // NOLINT(google-explicit-constructor)
      : tensors_(tensors.begin(), tensors.end()) {}
  std::size_t size() const { return tensors_.size(); }
  const AnyTensor& operator[](std::size_t i) const { return tensors_[i]; }

 private:
  std::vector<AnyTensor> tensors_;
};

/// Returns f(x) for each x, for any other op.
std::vector<DTensor> foreach_apply(const std::vector<DTensor>& xs, FunctionRef<DTensor(const DTensor&)> f);
/// Returns f(xs[i], ys[i]).
std::vector<DTensor> foreach_apply(const std::vector<DTensor>& xs, const std::vector<DTensor>& ys,
                                   FunctionRef<DTensor(const DTensor&, const DTensor&)> f);

std::vector<DTensor> foreach_abs(const std::vector<DTensor>& xs);
std::vector<DTensor> foreach_neg(const std::vector<DTensor>& xs);
std::vector<DTensor> foreach_sqrt(const std::vector<DTensor>& xs);
std::vector<DTensor> foreach_reciprocal(const std::vector<DTensor>& xs);
std::vector<DTensor> foreach_add(const std::vector<DTensor>& xs, const AnyTensors& ys);
std::vector<DTensor> foreach_sub(const std::vector<DTensor>& xs, const AnyTensors& ys);
std::vector<DTensor> foreach_mul(const std::vector<DTensor>& xs, const AnyTensors& ys);
std::vector<DTensor> foreach_div(const std::vector<DTensor>& xs, const AnyTensors& ys);
std::vector<DTensor> foreach_maximum(const std::vector<DTensor>& xs, const AnyTensors& ys);
std::vector<DTensor> foreach_minimum(const std::vector<DTensor>& xs, const AnyTensors& ys);
std::vector<DTensor> foreach_add(const std::vector<DTensor>& xs, const at::Scalar& y);
std::vector<DTensor> foreach_sub(const std::vector<DTensor>& xs, const at::Scalar& y);
std::vector<DTensor> foreach_mul(const std::vector<DTensor>& xs, const at::Scalar& y);
std::vector<DTensor> foreach_div(const std::vector<DTensor>& xs, const at::Scalar& y);

// In place: each x keeps its placements, as in `add_`.
void foreach_add_(const std::vector<DTensor>& xs, const AnyTensors& ys);
void foreach_sub_(const std::vector<DTensor>& xs, const AnyTensors& ys);
void foreach_mul_(const std::vector<DTensor>& xs, const AnyTensors& ys);
void foreach_div_(const std::vector<DTensor>& xs, const AnyTensors& ys);
void foreach_copy_(const std::vector<DTensor>& xs, const AnyTensors& ys);
void foreach_add_(const std::vector<DTensor>& xs, const at::Scalar& y);
void foreach_mul_(const std::vector<DTensor>& xs, const at::Scalar& y);
void foreach_zero_(const std::vector<DTensor>& xs);

/// Returns the greatest element of each x.
std::vector<DTensor> foreach_max(const std::vector<DTensor>& xs);
/// Returns vector_norm(x, p) of each x, replicated.
std::vector<DTensor> foreach_norm(const std::vector<DTensor>& xs, double p = 2);
/// Returns powsum(x, p) of each x, without reducing partial results.
std::vector<DTensor> foreach_powsum(const std::vector<DTensor>& xs, double p);

/// Returns the norm of all elements of all tensors, as if they were one vector: [], on every rank; 0 for no tensors.
/// For tensors in half precision it is a float. It is not differentiable. This rank must be in the mesh of each tensor.
/// Takes one collective for all tensors with equal placements on a mesh. PyTorch: torch.nn.utils.get_total_norm, for
/// tensors of one mesh.
at::Tensor get_total_norm(const std::vector<DTensor>& xs, double p = 2);
/// Multiplies the gradients of `parameters` by max_norm / (norm + 1e-6) if that is less than 1, and returns the total
/// norm that they had. Parameters without a gradient are left out. Every rank throws `Error(invalid_argument)` if the
/// ranks leave out different ones or pass other arguments, for a `p` of NaN and for a `max_norm` that is negative or
/// NaN. Throws it also if `error_if_nonfinite` and the norm is not finite; the gradients are left as they are. PyTorch:
/// torch.nn.utils.clip_grad_norm_.
at::Tensor clip_grad_norm_(const std::vector<DTensor>& parameters, double max_norm, double p = 2,
                           bool error_if_nonfinite = false);

}  // namespace tessera::dtensor
