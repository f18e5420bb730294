// The norm of all gradients of a sharded model, and scaling to a maximum norm.

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

// The joint norm of tensors that are sharded over groups of ranks.
class ShardedNorm {
 public:
  explicit ShardedNorm(double type) : type_(type) {}

  // Adds a tensor that is sharded over all of `groups` and replicated on other ranks. `elements` are this rank's,
  // undefined if it has none.
  void add(const at::Tensor& elements, const std::vector<ProcessGroup>& groups) {
    auto found =
        std::find_if(parts_.begin(), parts_.end(), [&](const Part& part) { return same_groups(part.groups, groups); });
    if (found == parts_.end()) found = parts_.insert(parts_.end(), {groups, {}});
    if (!elements.defined() || elements.numel() == 0) return;
    const at::Tensor norm = elements.detach().norm(type_, at::kDouble);
    found->norms.push_back(found->norms.empty() ? norm : norm.to(found->norms[0].device()));
  }

  // Returns the norm. A collective of all groups that were passed to add().
  double norm() const {
    double all = 0;
    bool is_nan = false;
    for (const Part& part : parts_) {
      const double mine = power_of(part.norms);
      // NaN is reduced separately: backends differ in the maximum of NaN and a number.
      const at::Tensor power = at::full({1}, std::isnan(mine) ? 0 : mine, at::kDouble);
      const at::Tensor nans = at::full({1}, std::isnan(mine) ? 1 : 0, at::kDouble);
      for (const ProcessGroup& group : part.groups) {
        group.start_all_reduce(power, is_max() ? ReduceOp::max : ReduceOp::sum).wait();
        group.start_all_reduce(nans).wait();
      }
      is_nan = is_nan || nans.item<double>() != 0;
      all = is_max() ? std::max(all, power.item<double>()) : all + power.item<double>();
    }
    if (is_nan) return std::nan("");
    return is_max() ? all : std::pow(all, 1 / type_);
  }

 private:
  // The tensors that are sharded over the same groups.
  struct Part {
    std::vector<ProcessGroup> groups;
    std::vector<at::Tensor> norms;
  };

  static bool same_groups(const std::vector<ProcessGroup>& a, const std::vector<ProcessGroup>& b) {
    return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                      [](const ProcessGroup& x, const ProcessGroup& y) { return x.world_ranks() == y.world_ranks(); });
  }
  bool is_max() const { return std::isinf(type_); }
  // Returns the sum of powers, which ranks add up; for the infinity norm the maximum.
  double power_of(const std::vector<at::Tensor>& norms) const {
    if (norms.empty()) return 0.0;
    const auto norm = at::stack(norms).norm(type_).item<double>();
    return is_max() ? norm : std::pow(norm, type_);
  }

  double type_;
  std::vector<Part> parts_;  // in the order of the parameters, which is the same on all ranks
};

}  // namespace

at::Tensor ShardedModule::clip_grad_norm_(double max_norm, double norm_type) {
  runtime_->check_call("clip_grad_norm_", [&](CallArguments& arguments) {
    runtime_->check_idle("clip_grad_norm_");
    if (!(norm_type > 0))
      fail(ErrorCode::invalid_argument, "clip_grad_norm_: norm_type is {}, expected above 0", norm_type);
    for (const Unit* unit : runtime_->units()) {
      unit->handle()->adopt_visible_gradients();
      if (!unit->handle()->has_unsharded_gradient()) continue;
      fail(ErrorCode::invalid_argument,
           "clip_grad_norm_: the gradient of unit '{}' was not reduced, expected a backward without no_sync",
           printable(unit->name()));
    }
    arguments.add("max_norm", max_norm).add("norm_type", norm_type);
  });
  const c10::NoGradGuard no_grad;
  const ParameterParts parts(*module_ptr());
  std::vector<at::Tensor> grads;
  ShardedNorm norm_of_all(norm_type);
  if (runtime_->has_own_groups()) norm_of_all.add(at::Tensor(), {group()});
  // `elements` are this rank's elements of the gradient of `param`; `unit` is the one that has it, or null.
  const auto add = [&](const at::Tensor& param, at::Tensor elements, const Unit* unit) {
    const bool in_shard = unit != nullptr && is_sharded(unit->handle()->options().strategy);
    std::vector<ProcessGroup> groups;
    if (runtime_->group_of(unit) != group()) {  // other ranks have other parameters, and each is counted once
      groups.push_back(group());
      if (!in_shard && unit->handle()->group().rank() != 0) elements.reset();
    } else if (in_shard) {
      groups.push_back(group());
    }
    if (const DTensorSpec* spec = parts.find(param)) {
      for (std::int64_t m = 0; m < spec->mesh.ndim(); ++m) {
        if (spec->layout.placements()[static_cast<std::size_t>(m)].is_shard()) groups.push_back(spec->mesh.group(m));
      }
    }
    norm_of_all.add(elements, groups);
  };
  const auto add_param = [&](const at::Tensor& param, const Unit* unit) {
    if (param.grad().defined()) grads.push_back(param.grad());
    add(param, param.grad(), unit);
  };
  std::set<const void*> seen;
  for (const Unit* unit : runtime_->units()) {
    const FlatParamHandle& handle = *unit->handle();
    for (const at::Tensor& param : handle.params()) seen.insert(param.unsafeGetTensorImpl());
    if (options().use_orig_params) {
      for (const at::Tensor& param : handle.params()) add_param(param, unit);
      continue;
    }
    const at::Tensor& grad = handle.flat_param().grad();
    if (grad.defined()) grads.push_back(grad);
    for (std::size_t i = 0; i < handle.params().size(); ++i) {
      add(handle.params()[i], grad.defined() ? handle.piece_of(grad, i) : grad, unit);
    }
  }
  for (const at::Tensor& param : runtime_->module()->parameters()) {
    if (param.defined() && seen.insert(param.unsafeGetTensorImpl()).second) add_param(param, nullptr);
  }
  const double norm = norm_of_all.norm();
  const double factor = max_norm / (norm + 1e-6);
  if (!(factor >= 1)) {  // also if it is NaN
    for (const at::Tensor& grad : grads) grad.mul_(factor);
  }
  return at::full({}, norm, at::kDouble);
}

}  // namespace tessera::fsdp
