#pragma once
/// \file
/// Scaling of the loss, so that small gradients survive in low precision, where ranks share the gradients.
///
///     fsdp::ShardedGradScaler scaler(group);
///     scaler.scale(loss).backward();
///     scaler.unscale_(optimizer);        // only where gradients are looked at or clipped before the step
///     model.clip_grad_norm_(1.0);
///     bool stepped = scaler.step(optimizer);
///     scaler.update();
///
/// Gradients that overflowed (inf or nan) are found when they are divided by the scale, and if any rank finds one in
/// its shard, no rank steps. Then update() multiplies the scale by `backoff_factor`; after `growth_interval` updates in
/// a row without, by `growth_factor`, but never beyond what float32 holds.
///
/// Law: where ranks begin with the same scale and call the same functions, they have the same scale after each, and
/// either all step or none. The numbers are those of PyTorch's GradScaler on the same findings.
///
/// For each optimizer the order is scale, unscale_ if at all, step; and update once for all of them. Another one is
/// `Error(invalid_argument)`. Used by one thread at a time. PyTorch: torch/amp/grad_scaler.py,
/// torch/distributed/fsdp/sharded_grad_scaler.py.

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <optional>
#include <unordered_map>
#include <vector>

#include "tessera/comm/process_group.h"
#include "tessera/state/value.h"

namespace tessera::fsdp {

struct GradScalerOptions {
  double init_scale = 65536.0;
  double growth_factor = 2.0;   ///< above 1
  double backoff_factor = 0.5;  ///< below 1
  std::int64_t growth_interval = 2000;
  bool enabled = true;  ///< if not, losses and gradients stay as they are, and step() is the optimizer's
};

class ShardedGradScaler {
 public:
  /// `group` are the ranks that have parts of the same gradients, those of hybrid sharding's replicas included. Throws
  /// `Error(invalid_argument)` for factors out of range.
  explicit ShardedGradScaler(const ProcessGroup& group = {}, const GradScalerOptions& options = {});

  /// What to call backward on: `output`, of its own dtype, times the scale. The first device that is seen here is where
  /// the scale is kept; it must be of one type on all ranks.
  at::Tensor scale(const at::Tensor& output);
  std::vector<at::Tensor> scale(const std::vector<at::Tensor>& outputs);

  /// Divides the gradients of the optimizer's parameters by the scale, in place and in their own dtype, and finds out
  /// whether all ranks' are finite. Undefined and empty ones are fine. A collective. At most once for an optimizer
  /// before its step. Throws `Error(unsupported)` for gradients of no floating-point dtype.
  void unscale_(torch::optim::Optimizer& optimizer);

  /// unscale_, unless that has been called, and then the optimizer's step, if all ranks' gradients are finite. Whether
  /// they were. A collective unless unscale_ has been called; waits for the device. At most once for an optimizer
  /// before update(). A closure is `Error(unsupported)` while scaling is enabled: its gradients would be scaled.
  bool step(torch::optim::Optimizer& optimizer, torch::optim::Optimizer::LossClosure closure = nullptr);

  /// The scale that the next iteration begins with; `new_scale` if given, which must be positive. Throws
  /// `Error(invalid_argument)` if no gradients were unscaled since the last.
  void update(std::optional<double> new_scale = std::nullopt);

  /// Waits for the device. 1 if not enabled.
  double get_scale() const;
  double get_growth_factor() const { return options_.growth_factor; }
  void set_growth_factor(double factor) { options_.growth_factor = factor; }
  double get_backoff_factor() const { return options_.backoff_factor; }
  void set_backoff_factor(double factor) { options_.backoff_factor = factor; }
  std::int64_t get_growth_interval() const { return options_.growth_interval; }
  void set_growth_interval(std::int64_t interval) { options_.growth_interval = interval; }
  bool is_enabled() const { return options_.enabled; }

  /// As PyTorch's GradScaler has it: scale, growth_factor, backoff_factor, growth_interval and _growth_tracker, to be
  /// taken after update(). The same on all ranks. Empty if not enabled.
  StateDict state_dict() const;
  /// Takes what state_dict or PyTorch's gave; other keys are not looked at. All is set or nothing. Does nothing if not
  /// enabled. Throws `Error(invalid_argument)` for what is missing or of another kind.
  void load_state_dict(const StateDict& state_dict);

 private:
  enum class Stage : std::uint8_t { ready, unscaled, stepped };
  struct OptimizerState {
    Stage stage = Stage::ready;
    at::Tensor found_inf;  // 1 or 0, on the device of the scale
  };
  void check_scaled(const char* function) const;
  std::int64_t growth_tracker() const;

  ProcessGroup group_;
  GradScalerOptions options_;
  std::int64_t init_growth_tracker_ = 0;
  at::Tensor scale_, growth_tracker_;  // float32 and int32 scalars, once there is a device
  std::unordered_map<const torch::optim::Optimizer*, OptimizerState> optimizers_;  // since the last update
};

}  // namespace tessera::fsdp
