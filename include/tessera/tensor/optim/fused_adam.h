#pragma once
/// \file
/// Fused steps of Adam and AdamW on DTensors: one pass over each parameter, its gradient and its state.
///
/// Law: the parameters and states are those that torch::optim::Adam, or AdamW, computes from the full tensors, up to
/// rounding. Dense CPU tensors of float or double with equal strides take one pass; others are updated by ATen's ops.
///
/// All ranks of the parameters' meshes call them with lists of the same tensors in the same order. Parameters may be on
/// different meshes. PyTorch: `torch._fused_adam_` and `torch._fused_adamw_`, which `fused=True` of the optimizers
/// calls.

#include <ATen/core/Tensor.h>

#include <optional>
#include <variant>
#include <vector>

#include "tessera/tensor/dtensor.h"
#include "tessera/tensor/dtensor_ops.h"

namespace tessera::dtensor {

struct FusedAdamOptions {
  std::variant<double, AnyTensor> lr = 1e-3;  ///< a tensor has one element
  double beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0;
  bool amsgrad = false;
  bool maximize = false;
  /// The number that gradients are divided by, as one element. The gradients themselves do not change. Equal on all
  /// ranks.
  std::optional<at::Tensor> grad_scale = std::nullopt;
  /// If its one element is not 0, nothing changes. Equal on all ranks.
  std::optional<at::Tensor> found_inf = std::nullopt;
};

/// The tensors of a step, by parameter. A gradient is on the mesh of its parameter and is redistributed to the
/// parameter's placements; the averages have these placements. `max_exp_avg_sqs` is empty without amsgrad.
/// `state_steps` have one element each, which counts this step already. Steps and `lr` may be on any mesh that has all
/// ranks of the parameter's.
struct FusedAdamTensors {
  std::vector<DTensor> params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs;
  std::vector<AnyTensor> state_steps;
};

// Update parameters and averages in place, without recording gradients. They throw `Error(invalid_argument)` for lists
// of different lengths and for averages of other sizes, placements or dtypes than the parameter's, before anything
// changes; `Error(invalid_argument)` for a step or an `lr` that is not on all ranks of a parameter's mesh;
// `Error(unsupported)` for a partial parameter.
void fused_adam_(const FusedAdamTensors& tensors, const FusedAdamOptions& options = {});
/// Decays the weights apart from the gradient.
void fused_adamw_(const FusedAdamTensors& tensors, const FusedAdamOptions& options = {});

}  // namespace tessera::dtensor
