// Parameters and gradients as a whole, outside of forward and backward.

#include <ATen/ops/full.h>
#include <ATen/ops/stack.h>
#include <c10/core/GradMode.h>

#include <cmath>
#include <set>

#include "fsdp/runtime.h"
#include "tessera/base/error.h"

namespace tessera::fsdp {

namespace {

// The gradients of some parameters, which are hidden while it lives: they have the shape of what is sharded.
class HiddenGradients {
 public:
  explicit HiddenGradients(const std::vector<at::Tensor>& params) : params_(params) {
    for (const at::Tensor& param : params_) {
      grads_.push_back(param.grad());
      param.mutable_grad().reset();
    }
  }
  ~HiddenGradients() {
    for (std::size_t i = 0; i < params_.size(); ++i) params_[i].mutable_grad() = grads_[i];
  }
  HiddenGradients(const HiddenGradients&) = delete;
  HiddenGradients& operator=(const HiddenGradients&) = delete;

 private:
  const std::vector<at::Tensor>& params_;
  std::vector<at::Tensor> grads_;
};

// A unit that may be whole while this lives, and is sharded when it ends.
class Summoned {
 public:
  explicit Summoned(FlatParamHandle& handle) : handle_(handle), gradients_(handle.params()) {}
  void summon(const SummonOptions& options) {
    handle_.set_training_state(TrainingState::summon_full_params);
    handle_.write_back_params();
    handle_.free_unsharded();
    handle_.use_full_precision(true);
    handle_.unshard();
    if (options.with_grads) handle_.unshard_grad();
    if (options.rank0_only && handle_.group().rank() != 0) handle_.reshard();
    if (options.offload_to_cpu) handle_.to_cpu();
  }
  ~Summoned() {
    handle_.reshard();
    handle_.use_full_precision(false);
    handle_.set_training_state(TrainingState::idle);
  }
  Summoned(const Summoned&) = delete;
  Summoned& operator=(const Summoned&) = delete;

 private:
  FlatParamHandle& handle_;
  HiddenGradients gradients_;
};

}  // namespace

void ShardedModule::summon_full_params(const std::function<void()>& f, const SummonOptions& options) {
  runtime_->check_idle("summon_full_params was called");
  if (options.rank0_only && options.writeback) {
    fail(ErrorCode::invalid_argument,
         "summon_full_params: rank0_only with writeback, expected one of them: what rank 0 "
         "changes would not reach the others");
  }
  runtime_->cast_buffers(/*own_dtype=*/true);
  std::vector<std::unique_ptr<Summoned>> summoned;
  for (Unit* unit : runtime_->units()) {
    summoned.push_back(std::make_unique<Summoned>(*unit->handle()));
    summoned.back()->summon(options);
  }
  group().agree_on("summon_full_params", [&] {
    const c10::AutoGradMode no_gradient(false);
    runtime_->is_summoned = true;
    try {
      f();
    } catch (...) {
      runtime_->is_summoned = false;
      throw;
    }
    runtime_->is_summoned = false;
  });
  if (!options.writeback) return;
  for (Unit* unit : runtime_->units()) unit->handle()->write_back_unsharded();
}

at::Tensor ShardedModule::clip_grad_norm_(double max_norm, double norm_type) {
  runtime_->check_idle("clip_grad_norm_ was called");
  if (!(norm_type > 0)) fail(ErrorCode::invalid_argument, "clip_grad_norm_: norm_type {}, expected above 0", norm_type);
  const c10::NoGradGuard no_grad;
  std::vector<at::Tensor> grads;
  std::vector<at::Tensor> own_norms, shared_norms;  // of what this rank alone has, and of what all have
  const auto add = [&](const at::Tensor& param, bool is_shared) {
    const at::Tensor& grad = param.grad();
    if (!grad.defined() || grad.numel() == 0) return;
    grads.push_back(grad);
    (is_shared ? shared_norms : own_norms).push_back(grad.detach().norm(norm_type, at::kDouble).to(grads[0].device()));
  };
  // Of all of them together, to the power of norm_type: what adds up. The highest, if that is infinite.
  const bool is_max = std::isinf(norm_type);
  const auto power_of = [&](const std::vector<at::Tensor>& norms) {
    if (norms.empty()) return 0.0;
    const auto norm = at::stack(norms).norm(norm_type).item<double>();
    return is_max ? norm : std::pow(norm, norm_type);
  };
  std::set<const void*> seen;
  const bool is_cut = is_sharded(options().strategy);
  for (const Unit* unit : runtime_->units()) {
    const FlatParamHandle& handle = *unit->handle();
    if (handle.has_unsharded_gradient()) {
      fail(ErrorCode::invalid_argument,
           "clip_grad_norm_: the gradient of unit '{}' was not reduced, expected a backward without no_sync",
           printable(unit->name()));
    }
    for (const at::Tensor& param : handle.params()) seen.insert(param.unsafeGetTensorImpl());
    if (!options().use_orig_params) add(handle.flat_param(), !is_cut);
    if (!options().use_orig_params) continue;
    for (const at::Tensor& param : handle.params()) add(param, !is_cut);
  }
  for (const at::Tensor& param : runtime_->module()->parameters()) {
    if (param.defined() && seen.insert(param.unsafeGetTensorImpl()).second) add(param, true);
  }
  const at::Tensor power = at::full({1}, power_of(own_norms), at::kDouble);
  if (is_cut) group().all_reduce(power, is_max ? ReduceOp::max : ReduceOp::sum);
  const double own = power.item<double>(), shared = power_of(shared_norms);
  const double norm = is_max ? std::max(own, shared) : std::pow(own + shared, 1 / norm_type);
  const double factor = max_norm / (norm + 1e-6);
  if (!(factor >= 1)) {  // also where it is no number
    for (const at::Tensor& grad : grads) grad.mul_(factor);
  }
  return at::full({}, norm, at::kDouble);
}

}  // namespace tessera::fsdp
