#include "tessera/tensor/dtensor_ops/lists.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "tensor/dtensor/explicit_redistribution.h"
#include "tensor/dtensor_ops/calls.h"
#include "tessera/base/error.h"
#include "tessera/base/function_ref.h"

namespace tessera::dtensor {

using List = std::vector<DTensor>;

List foreach_apply(const List& xs, FunctionRef<DTensor(const DTensor&)> f) {
  List results;
  results.reserve(xs.size());
  for (const DTensor& x : xs) results.push_back(f(x));
  return results;
}

namespace {

template <typename Others, typename F>
List applied_to_pairs(const List& xs, const Others& ys, const F& f) {
  if (xs.size() != ys.size()) {
    fail(ErrorCode::invalid_argument, "op on lists of {} and {} tensors: expected as many of each", xs.size(),
         ys.size());
  }
  List results;
  results.reserve(xs.size());
  for (std::size_t i = 0; i < xs.size(); ++i) results.push_back(f(xs[i], ys[i]));
  return results;
}

}  // namespace

List foreach_apply(const List& xs, const List& ys, FunctionRef<DTensor(const DTensor&, const DTensor&)> f) {
  return applied_to_pairs(xs, ys, f);
}

namespace {

// Of one and of two tensors, and of a tensor and a number. These select an overload.
using One = DTensor (*)(const DTensor&);
using Two = DTensor (*)(const AnyTensor&, const AnyTensor&);
using Number = DTensor (*)(const DTensor&, const at::Scalar&);
using InPlace = DTensor (*)(const DTensor&, const AnyTensor&);

List each(const List& xs, const AnyTensors& ys, Two f) { return applied_to_pairs(xs, ys, f); }
List each(const List& xs, const at::Scalar& y, Number f) {
  return foreach_apply(xs, [&](const DTensor& x) { return f(x, y); });
}
void each_in_place(const List& xs, const AnyTensors& ys, InPlace f) { applied_to_pairs(xs, ys, f); }

}  // namespace

List foreach_abs(const List& xs) { return foreach_apply(xs, One(abs)); }
List foreach_neg(const List& xs) { return foreach_apply(xs, One(neg)); }
List foreach_sqrt(const List& xs) { return foreach_apply(xs, One(sqrt)); }
List foreach_reciprocal(const List& xs) { return foreach_apply(xs, One(reciprocal)); }
List foreach_add(const List& xs, const AnyTensors& ys) { return each(xs, ys, add); }
List foreach_sub(const List& xs, const AnyTensors& ys) { return each(xs, ys, sub); }
List foreach_mul(const List& xs, const AnyTensors& ys) { return each(xs, ys, mul); }
List foreach_div(const List& xs, const AnyTensors& ys) { return each(xs, ys, div); }
List foreach_maximum(const List& xs, const AnyTensors& ys) { return each(xs, ys, maximum); }
List foreach_minimum(const List& xs, const AnyTensors& ys) { return each(xs, ys, minimum); }
List foreach_add(const List& xs, const at::Scalar& y) { return each(xs, y, add); }
List foreach_sub(const List& xs, const at::Scalar& y) { return each(xs, y, sub); }
List foreach_mul(const List& xs, const at::Scalar& y) { return each(xs, y, mul); }
List foreach_div(const List& xs, const at::Scalar& y) { return each(xs, y, div); }
void foreach_add_(const List& xs, const AnyTensors& ys) { each_in_place(xs, ys, add_); }
void foreach_sub_(const List& xs, const AnyTensors& ys) { each_in_place(xs, ys, sub_); }
void foreach_mul_(const List& xs, const AnyTensors& ys) { each_in_place(xs, ys, mul_); }
void foreach_div_(const List& xs, const AnyTensors& ys) { each_in_place(xs, ys, div_); }
void foreach_copy_(const List& xs, const AnyTensors& ys) { each_in_place(xs, ys, copy_); }
void foreach_add_(const List& xs, const at::Scalar& y) { each(xs, y, Number(add_)); }
void foreach_mul_(const List& xs, const at::Scalar& y) { each(xs, y, Number(mul_)); }
void foreach_zero_(const List& xs) { foreach_apply(xs, One(zero_)); }

namespace {

// The tensors of a list with equal placements on one mesh, by their places in the list.
std::vector<std::vector<std::size_t>> groups_of_list(const List& xs) {
  std::vector<std::vector<std::size_t>> groups;
  for (std::size_t i = 0; i < xs.size(); ++i) {
    const auto found = std::find_if(groups.begin(), groups.end(), [&](const std::vector<std::size_t>& group) {
      const DTensor& first = xs[group[0]];
      return first.device_mesh() == xs[i].device_mesh() && first.placements() == xs[i].placements() &&
             first.scalar_type() == xs[i].scalar_type();
    });
    if (found == groups.end()) {
      groups.push_back({i});
    } else {
      found->push_back(i);
    }
  }
  return groups;
}

// Returns the tensors of a group, of size [], in one of size [n].
DTensor stacked(const List& xs, const std::vector<std::size_t>& group) {
  List members;
  members.reserve(group.size());
  for (const std::size_t i : group) members.push_back(xs[i]);
  return stack(members);
}

// Returns tensors of size [] with partial placements reduced.
List reduced_together(List xs) {
  for (const std::vector<std::size_t>& group : groups_of_list(xs)) {
    const Placements replicated = xs[group[0]].grad_placements();
    if (replicated == xs[group[0]].placements()) continue;
    const List parts = unbind(redistributed_by_op(stacked(xs, group), replicated));
    for (std::size_t i = 0; i < group.size(); ++i) xs[group[i]] = parts[i];
  }
  return xs;
}

// Compares what `describe` adds on all ranks of the tensors' meshes.
void check_on_all_meshes(const char* op, const List& xs, FunctionRef<void(CallArguments&)> describe) {
  List of_each_mesh;
  for (const DTensor& x : xs) {
    const bool is_new = std::none_of(of_each_mesh.begin(), of_each_mesh.end(),
                                     [&](const DTensor& other) { return other.device_mesh() == x.device_mesh(); });
    if (is_new && x.device_mesh().has_this_rank()) of_each_mesh.push_back(x);
  }
  for (const DTensor& x : of_each_mesh) x.device_mesh().group().check_call(op, describe);
}

}  // namespace

List foreach_max(const List& xs) {
  return reduced_together(foreach_apply(xs, [](const DTensor& x) { return amax(x); }));
}

List foreach_powsum(const List& xs, double p) {
  return foreach_apply(xs, [&](const DTensor& x) { return powsum(x, p); });
}

List foreach_norm(const List& xs, double p) {
  for (const DTensor& x : xs) check_norm("foreach_norm", x, p);
  if (std::isinf(p) || std::isnan(p)) {
    return reduced_together(foreach_apply(xs, [&](const DTensor& x) { return vector_norm(x, p); }));
  }
  List norms = reduced_together(foreach_apply(xs, [&](const DTensor& x) { return wide_powsum(x, p); }));
  for (std::size_t i = 0; i < xs.size(); ++i) norms[i] = narrowed_as(xs[i], root(norms[i], p));
  return norms;
}

at::Tensor get_total_norm(const List& xs, double p) {
  for (const DTensor& x : xs) check_norm("get_total_norm", x, p);
  const List norms = foreach_apply(
      xs, [&](const DTensor& x) { return std::isfinite(p) ? wide_powsum(x.detach(), p) : vector_norm(x.detach(), p); });
  at::Tensor total = at::zeros({});
  bool is_first = true;
  for (const std::vector<std::size_t>& group : groups_of_list(norms)) {
    at::Tensor all = stacked(norms, group).full_tensor();
    all = all.to(at::toOpMathType(all.scalar_type()));
    if (std::isfinite(p)) {
      total = is_first ? all.sum() : total + all.sum();
    } else {
      const at::Tensor extreme = p > 0 ? all.amax() : all.amin();
      total = is_first ? extreme : p > 0 ? at::maximum(total, extreme) : at::minimum(total, extreme);
    }
    is_first = false;
  }
  return std::isfinite(p) && p != 0 ? total.pow(1 / p) : total;
}

at::Tensor clip_grad_norm_(const List& parameters, double max_norm, double p, bool error_if_nonfinite) {
  const at::NoGradGuard no_grad;
  List gradients;
  std::string has_gradient;
  for (const DTensor& parameter : parameters) {
    const std::optional<DTensor> gradient = parameter.grad();
    has_gradient += gradient ? "1" : "0";
    if (gradient) gradients.push_back(*gradient);
  }
  check_on_all_meshes("clip_grad_norm_", parameters, [&](CallArguments& arguments) {
    if (!(max_norm >= 0))
      fail(ErrorCode::invalid_argument, "clip_grad_norm_: max_norm is {}, expected at least 0", max_norm);
    if (std::isnan(p)) fail(ErrorCode::invalid_argument, "clip_grad_norm_: norm of order {}, expected a number", p);
    arguments.add("which parameters have a gradient", has_gradient)
        .add("max_norm", max_norm)
        .add("order", p)
        .add("error_if_nonfinite", error_if_nonfinite);
  });
  // On a rank that is in no mesh of a parameter, nothing was compared.
  if (!(max_norm >= 0))
    fail(ErrorCode::invalid_argument, "clip_grad_norm_: max_norm is {}, expected at least 0", max_norm);
  at::Tensor norm = get_total_norm(gradients, p);
  const double found = norm.item<double>();
  if (error_if_nonfinite && !std::isfinite(found)) {
    fail(ErrorCode::invalid_argument, "clip_grad_norm_: the norm of order {} is {}, expected a finite norm", p, found);
  }
  const double scale = std::min(max_norm / (found + 1e-6), 1.0);
  foreach_mul_(gradients, std::isnan(found) ? found : scale);
  return norm;
}

}  // namespace tessera::dtensor
