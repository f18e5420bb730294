#pragma once
/// \file
/// Adam and AdamW in one pass over each parameter, its gradient and its state. LibTorch's take about ten passes, and
/// allocate memory in each step. They are for parameters of any kind, such as those of a
/// `fsdp::FullyShardedDataParallel`.
///
/// Law: parameters and state are those of torch::optim::Adam, or AdamW, with the same options, up to rounding. The
/// state has the same classes, so that state dicts have the same entries, and each optimizer resumes from the other's.
/// Dense CPU tensors of float or double with equal strides take one pass; others are updated by ATen's ops.
///
/// PyTorch: torch.optim.Adam and AdamW with `fused=True`.

#include <ATen/core/Tensor.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>

namespace tessera {

/// torch::optim::Adam, in one pass over each parameter.
class FusedAdam final : public torch::optim::Adam {
 public:
  using torch::optim::Adam::Adam;
  /// Throws `Error(unsupported)` for a sparse gradient, and `Error(invalid_argument)` for a state without
  /// max_exp_avg_sq if amsgrad is set, before anything changes.
  at::Tensor step(LossClosure closure = nullptr) override;
};

/// torch::optim::AdamW, which decays the weights apart from the gradient, in one pass over each parameter.
class FusedAdamW final : public torch::optim::AdamW {
 public:
  using torch::optim::AdamW::AdamW;
  /// Throws as that of FusedAdam.
  at::Tensor step(LossClosure closure = nullptr) override;
};

}  // namespace tessera
