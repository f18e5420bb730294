// The norm of all gradients of a sharded model, and scaling to a maximum norm.

#include <ATen/ops/maximum.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "fsdp/runtime/runtime.h"
#include "fsdp/warn.h"
#include "tessera/base/error.h"
#include "tessera/state/internal/parameter_parts.h"

namespace tessera::fsdp {

namespace {

// The joint norm of tensors that are sharded over groups of ranks. Computed on one device, without waiting for it, in
// float64 on every rank: a rank that has no gradients does not know their dtype.
class ShardedNorm {
 public:
  ShardedNorm(double type, at::Device device)
      : type_(type), scalar_(at::TensorOptions().dtype(at::kDouble).device(device)) {}

  // Adds a tensor that is sharded over all of `groups` and replicated on other ranks. `elements` are this rank's,
  // undefined if it has none.
  void add(const at::Tensor& elements, const std::vector<ProcessGroup>& groups) {
    auto found =
        std::find_if(parts_.begin(), parts_.end(), [&](const Part& part) { return same_groups(part.groups, groups); });
    if (found == parts_.end()) found = parts_.insert(parts_.end(), {groups, {}});
    if (!elements.defined() || elements.numel() == 0) return;
    found->norms.push_back(elements.detach().norm(type_, at::kDouble).to(scalar_.device()));
  }

  // Returns the norm, a tensor of one number. A collective of all groups that were passed to add().
  at::Tensor norm() const {
    at::Tensor all = at::zeros({1}, scalar_);
    for (const Part& part : parts_) {
      at::Tensor power = power_of(part.norms);
      for (const ProcessGroup& group : part.groups) power = reduced(power, group);
      all = is_max() ? at::maximum(all, power) : all + power;
    }
    return is_max() ? all[0] : all[0].pow(1 / type_);
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
  at::Tensor power_of(const std::vector<at::Tensor>& norms) const {
    if (norms.empty()) return at::zeros({1}, scalar_);
    const at::Tensor norm = at::stack(norms).norm(type_).reshape({1});
    return is_max() ? norm : norm.pow(type_);
  }
  at::Tensor reduced(const at::Tensor& power, const ProcessGroup& group) const {
    if (!is_max()) {
      at::Tensor sum = power.clone();
      group.start_all_reduce(sum).wait();
      return sum;
    }
    // NaN is reduced separately: backends differ in the maximum of NaN and a number.
    const at::Tensor is_nan = power.isnan(), max = power.masked_fill(is_nan, 0), nans = is_nan.to(at::kDouble);
    group.start_all_reduce(max, ReduceOp::max).wait();
    group.start_all_reduce(nans, ReduceOp::max).wait();
    return max.masked_fill(nans > 0, std::nan(""));
  }

  double type_;
  at::TensorOptions scalar_;
  std::vector<Part> parts_;  // in the order of the parameters, which is the same on all ranks
};

// Returns the device of computation of the model.
at::Device device_of(const Runtime& runtime) {
  if (!runtime.units().empty()) return runtime.units()[0]->handle()->options().device;
  const std::vector<at::Tensor> params = runtime.module()->parameters();
  return params.empty() ? at::Device(at::kCPU) : params[0].device();
}

}  // namespace

at::Tensor ShardedModule::clip_grad_norm_(double max_norm, double norm_type) {
  runtime().check_call("clip_grad_norm_", [&](CallArguments& arguments) {
    runtime().check_idle("clip_grad_norm_");
    if (!(max_norm >= 0))
      fail(ErrorCode::invalid_argument, "clip_grad_norm_: max_norm is {}, expected at least 0", max_norm);
    if (!(norm_type > 0))
      fail(ErrorCode::invalid_argument, "clip_grad_norm_: norm_type is {}, expected above 0", norm_type);
    for (const Unit* unit : runtime().units()) {
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
  ShardedNorm norm_of_all(norm_type, device_of(runtime()));
  if (runtime().has_own_groups()) norm_of_all.add(at::Tensor(), {group()});
  // `elements` are this rank's elements of the gradient of `param`; `unit` is the one that has it, or null.
  const auto add = [&](const at::Tensor& param, at::Tensor elements, const Unit* unit) {
    const bool in_shard = unit != nullptr && is_sharded(unit->handle()->options().strategy);
    std::vector<ProcessGroup> groups;
    if (runtime().group_of(unit) != group()) {  // other ranks have other parameters, and each is counted once
      groups.push_back(group());
      if (options().replicas) groups.push_back(*options().replicas);  // the unit's group has all ranks then
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
  for (const Unit* unit : runtime().units()) {
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
  for (const at::Tensor& param : runtime().module()->parameters()) {
    if (param.defined() && seen.insert(param.unsafeGetTensorImpl()).second) add_param(param, nullptr);
  }
  const at::Tensor norm = norm_of_all.norm();
  const at::Tensor factor = (max_norm / (norm + 1e-6)).clamp_max(1.0);  // NaN stays
  for (const at::Tensor& grad : grads) grad.mul_(factor.to(grad.device(), grad.scalar_type()));
  if (grads.empty()) {
    warn_once(
        fmt::format("clip_grad_norm_: rank {} has no gradients, so its result is a float32", group().world_rank()));
    return norm.to(at::kFloat);
  }
  at::ScalarType dtype = grads[0].scalar_type();
  for (const at::Tensor& grad : grads) dtype = c10::promoteTypes(dtype, grad.scalar_type());
  return norm.to(dtype);
}

}  // namespace tessera::fsdp
