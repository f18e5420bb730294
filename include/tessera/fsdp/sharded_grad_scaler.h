#pragma once
/// \file
/// Loss scaling for gradients that are sharded over ranks, so that small gradients do not vanish in low precision.
///
///     fsdp::ShardedGradScaler scaler(group);
///     scaler.scale(loss).backward();
///     scaler.unscale_(optimizer);        // only to read or clip gradients before the step
///     model.clip_grad_norm_(1.0);
///     bool stepped = scaler.step(optimizer);
///     scaler.update();
///
/// Division by the scale detects gradients that overflowed (inf or nan). If any rank finds one in its shard, no rank
/// steps, and update() multiplies the scale by `backoff_factor`. After `growth_interval` updates in a row without
/// overflow, update() multiplies it by `growth_factor`, unless the result exceeds the range of float32.
///
/// Law: if all ranks start with the same scale and call the same functions, their scales are equal after each call, and
/// either all ranks step or none. Given the same overflows, the scales equal those of PyTorch's GradScaler.
///
/// For each optimizer, call scale, optionally unscale_, then step; then call update once for all optimizers. Any other
/// order throws `Error(invalid_argument)`. A scaler may be used by one thread at a time. PyTorch:
/// torch/amp/grad_scaler.py, torch/distributed/fsdp/sharded_grad_scaler.py.

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
  double init_scale = 65536.0;          ///< a float32 above 0
  double growth_factor = 2.0;           ///< above 1
  double backoff_factor = 0.5;          ///< above 0 and below 1
  std::int64_t growth_interval = 2000;  ///< 1 or more
  bool enabled = true;                  ///< if false, nothing is scaled and step() calls the optimizer's
};

class ShardedGradScaler {
 public:
  /// `group` contains all ranks that have parts of the same gradients; with hybrid sharding also the replicas. Throws
  /// `Error(invalid_argument)` if an option is out of its range, NaN or infinite.
  explicit ShardedGradScaler(const ProcessGroup& group = {}, const GradScalerOptions& options = {});

  /// Returns `output` times the scale, in the dtype of `output`. Call backward on the result. The scale is stored on
  /// the device of the first output, whose device type must be the same on all ranks.
  at::Tensor scale(const at::Tensor& output);
  std::vector<at::Tensor> scale(const std::vector<at::Tensor>& outputs);

  /// Divides the gradients of the optimizer's parameters by the scale, in place and in their own dtype, and determines
  /// whether they are finite on all ranks. Gradients may be undefined or empty. May be called at most once per
  /// optimizer before its step. A collective. Throws `Error(unsupported)` if a gradient has no floating-point dtype.
  void unscale_(torch::optim::Optimizer& optimizer);

  /// Calls unscale_ unless it has been called, then the optimizer's step if the gradients are finite on all ranks.
  /// Returns whether they are. May be called at most once per optimizer before update(). A collective. Blocks until the
  /// device has finished. Throws `Error(unsupported)` if a closure is passed while scaling is enabled, because the
  /// optimizer would see its scaled gradients.
  bool step(torch::optim::Optimizer& optimizer, torch::optim::Optimizer::LossClosure closure = nullptr);

  /// Sets the scale of the next iteration: to `new_scale` if given, otherwise by the rule above. Throws
  /// `Error(invalid_argument)` if `new_scale` is not a float32 above 0, or is not given and no gradients were unscaled
  /// since the last update.
  void update(std::optional<double> new_scale = std::nullopt);

  /// Returns the scale, 1 if scaling is not enabled. Blocks until the device has finished.
  double get_scale() const;
  double get_growth_factor() const { return options_.growth_factor; }
  double get_backoff_factor() const { return options_.backoff_factor; }
  std::int64_t get_growth_interval() const { return options_.growth_interval; }
  // Set an option. Throw `Error(invalid_argument)` for a value out of its range; nothing is set then. A factor of 1 is
  // permitted here and keeps the scale as it is.
  void set_growth_factor(double factor);
  void set_backoff_factor(double factor);
  void set_growth_interval(std::int64_t interval);
  bool is_enabled() const { return options_.enabled; }

  /// Returns the state of PyTorch's GradScaler: scale, growth_factor, backoff_factor, growth_interval and
  /// _growth_tracker. Call it after update(). Equal on all ranks. Empty if scaling is not enabled.
  StateDict state_dict() const;
  /// Loads a state dict of this class or of PyTorch's GradScaler. Other keys are ignored. Does nothing if scaling is
  /// not enabled. Throws `Error(invalid_argument)` if a key is missing, or if its value has another kind or is out of
  /// range: that of the setters, for _growth_tracker 0 to 2^31 - 1, and for scale a float32 above 0. Nothing is set
  /// then.
  void load_state_dict(const StateDict& state_dict);

 private:
  enum class Stage : std::uint8_t { ready, unscaled, stepped };
  struct OptimizerState {
    Stage stage = Stage::ready;
    at::Tensor found_inf;  // 1 or 0, on the device of the scale
  };
  void check_scaled(const char* function) const;
  void set_options(const char* function, const GradScalerOptions& options);
  void unscale(torch::optim::Optimizer& optimizer);
  std::int64_t growth_tracker() const;

  ProcessGroup group_;
  GradScalerOptions options_;
  std::int64_t init_growth_tracker_ = 0;
  at::Tensor scale_, growth_tracker_;  // float32 and int32 scalars, undefined until scale() is called
  std::unordered_map<const torch::optim::Optimizer*, OptimizerState> optimizers_;  // used since the last update
};

}  // namespace tessera::fsdp
