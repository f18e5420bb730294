// Parameters and gradients as a whole, outside of forward and backward.

#include <ATen/ops/full.h>
#include <ATen/ops/stack.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "fsdp/runtime/runtime.h"
#include "tessera/base/error.h"
#include "tessera/state/internal/parameter_parts.h"

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

// The norm of many tensors together, of which this rank has some elements and others the rest.
class SpreadNorms {
 public:
  explicit SpreadNorms(double type) : type_(type) {}

  // This rank's elements of a tensor, undefined if it has none. Those of the ranks of each of these groups make the
  // whole; ranks in none of them have the same.
  void add(const at::Tensor& elements, const std::vector<ProcessGroup>& spread_over) {
    auto found = std::find_if(kinds_.begin(), kinds_.end(),
                              [&](const Kind& kind) { return same_groups(kind.spread_over, spread_over); });
    if (found == kinds_.end()) found = kinds_.insert(kinds_.end(), {spread_over, {}});
    if (!elements.defined() || elements.numel() == 0) return;
    const at::Tensor norm = elements.detach().norm(type_, at::kDouble);
    found->norms.push_back(found->norms.empty() ? norm : norm.to(found->norms[0].device()));
  }

  // A collective of all these groups.
  double norm() const {
    double all = 0;
    bool is_nan = false;
    for (const Kind& kind : kinds_) {
      const double mine = power_of(kind.norms);
      // What is no number goes by itself: of it and a number, backends take either for the maximum.
      const at::Tensor power = at::full({1}, std::isnan(mine) ? 0 : mine, at::kDouble);
      const at::Tensor nans = at::full({1}, std::isnan(mine) ? 1 : 0, at::kDouble);
      for (const ProcessGroup& group : kind.spread_over) {
        group.all_reduce(power, is_max() ? ReduceOp::max : ReduceOp::sum);
        group.all_reduce(nans);
      }
      is_nan = is_nan || nans.item<double>() != 0;
      all = is_max() ? std::max(all, power.item<double>()) : all + power.item<double>();
    }
    if (is_nan) return std::nan("");
    return is_max() ? all : std::pow(all, 1 / type_);
  }

 private:
  struct Kind {
    std::vector<ProcessGroup> spread_over;
    std::vector<at::Tensor> norms;
  };

  static bool same_groups(const std::vector<ProcessGroup>& a, const std::vector<ProcessGroup>& b) {
    return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                      [](const ProcessGroup& x, const ProcessGroup& y) { return x.world_ranks() == y.world_ranks(); });
  }
  bool is_max() const { return std::isinf(type_); }
  // What adds up; the highest, if the norm is that.
  double power_of(const std::vector<at::Tensor>& norms) const {
    if (norms.empty()) return 0.0;
    const auto norm = at::stack(norms).norm(type_).item<double>();
    return is_max() ? norm : std::pow(norm, type_);
  }

  double type_;
  std::vector<Kind> kinds_;  // in the order of the parameters, which all ranks have
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
  const ParameterParts parts(*module_ptr());
  const bool is_cut = is_sharded(options().strategy);
  std::vector<at::Tensor> grads;
  SpreadNorms norms(norm_type);
  // `of_param`: the gradient of `param`, as far as it is in `grad`.
  const auto add = [&](const at::Tensor& param, const at::Tensor& of_param, bool is_cut_by_us) {
    std::vector<ProcessGroup> spread_over;
    if (is_cut_by_us) spread_over.push_back(group());
    if (const DTensorSpec* spec = parts.find(param)) {
      for (std::int64_t m = 0; m < spec->mesh.ndim(); ++m) {
        if (spec->layout.placements()[static_cast<std::size_t>(m)].is_shard()) {
          spread_over.push_back(spec->mesh.group(m));
        }
      }
    }
    norms.add(of_param, spread_over);
  };
  const auto add_whole = [&](const at::Tensor& param, bool is_cut_by_us) {
    if (param.grad().defined()) grads.push_back(param.grad());
    add(param, param.grad(), is_cut_by_us);
  };
  std::set<const void*> seen;
  for (const Unit* unit : runtime_->units()) {
    const FlatParamHandle& handle = *unit->handle();
    if (handle.has_unsharded_gradient()) {
      fail(ErrorCode::invalid_argument,
           "clip_grad_norm_: the gradient of unit '{}' was not reduced, expected a backward without no_sync",
           printable(unit->name()));
    }
    for (const at::Tensor& param : handle.params()) seen.insert(param.unsafeGetTensorImpl());
    if (options().use_orig_params) {
      for (const at::Tensor& param : handle.params()) add_whole(param, is_cut);
      continue;
    }
    const at::Tensor& grad = handle.flat_param().grad();
    if (grad.defined()) grads.push_back(grad);
    for (std::size_t i = 0; i < handle.params().size(); ++i) {
      add(handle.params()[i], grad.defined() ? handle.piece_of(grad, i) : grad, is_cut);
    }
  }
  for (const at::Tensor& param : runtime_->module()->parameters()) {
    if (param.defined() && seen.insert(param.unsafeGetTensorImpl()).second) add_whole(param, false);
  }
  const double norm = norms.norm();
  const double factor = max_norm / (norm + 1e-6);
  if (!(factor >= 1)) {  // also where it is no number
    for (const at::Tensor& grad : grads) grad.mul_(factor);
  }
  return at::full({}, norm, at::kDouble);
}

}  // namespace tessera::fsdp
