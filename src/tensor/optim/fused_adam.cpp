#include "tessera/tensor/optim/fused_adam.h"

#include <ATen/Parallel.h>
#include <ATen/ops/maximum.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <span>
#include <string>

#include "tensor/dtensor_rules/rules.h"
#include "tessera/base/error.h"
#include "tessera/tensor/dtensor_op.h"

namespace tessera::dtensor {

namespace {

enum class Decay : std::uint8_t { of_gradient, of_weight };

// The numbers of one step of one parameter.
struct AdamStep {
  double lr, beta1, beta2, eps, weight_decay, correction1, correction2, grad_factor;
  Decay decay;
};

// The local tensors of one parameter; `max_sq` is undefined without amsgrad.
struct AdamLocals {
  at::Tensor param, grad, avg, sq, max_sq;

  template <typename F>
  void each(const F& f) const {
    for (const at::Tensor* tensor : {&param, &grad, &avg, &sq, &max_sq}) {
      if (tensor->defined()) f(*tensor);
    }
  }
  // Returns whether all are of `dtype` on CPU, and the same place in memory is the same element in each.
  bool are_alike(at::ScalarType dtype) const {
    bool alike = param.is_non_overlapping_and_dense();
    each([&](const at::Tensor& tensor) {
      alike = alike && tensor.is_cpu() && tensor.scalar_type() == dtype && tensor.strides() == param.strides();
    });
    return alike;
  }
};

template <typename T>
void step_in_one_pass(const AdamLocals& of, const AdamStep& step) {
  T *param = of.param.data_ptr<T>(), *avg = of.avg.data_ptr<T>(), *sq = of.sq.data_ptr<T>();
  T* max_sq = of.max_sq.defined() ? of.max_sq.data_ptr<T>() : nullptr;
  const T* grad = of.grad.data_ptr<T>();
  const auto lr = static_cast<T>(step.lr), beta2 = static_cast<T>(step.beta2), eps = static_cast<T>(step.eps);
  const auto rest1 = static_cast<T>(1 - step.beta1), rest2 = static_cast<T>(1 - step.beta2);
  const auto decay = static_cast<T>(step.weight_decay), factor = static_cast<T>(step.grad_factor);
  const auto rate = static_cast<T>(step.lr / step.correction1), root2 = static_cast<T>(std::sqrt(step.correction2));
  const bool decays_weight = step.decay == Decay::of_weight;
  constexpr std::int64_t kElementsOfAThread = 32768;
  at::parallel_for(0, of.param.numel(), kElementsOfAThread, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      T g = grad[i] * factor, p = param[i];
      if (decays_weight) {
        p -= lr * decay * p;
      } else {
        g += decay * p;
      }
      avg[i] += rest1 * (g - avg[i]);
      sq[i] = sq[i] * beta2 + rest2 * g * g;
      T greatest = sq[i];
      if (max_sq != nullptr) greatest = max_sq[i] = std::max(max_sq[i], sq[i]);
      param[i] = p - rate * avg[i] / (std::sqrt(greatest) / root2 + eps);
    }
  });
}

void step_by_ops(const AdamLocals& of, const AdamStep& step) {
  at::Tensor grad = of.grad.to(of.param.scalar_type()) * step.grad_factor;
  if (step.decay == Decay::of_weight) {
    of.param.mul_(1 - step.lr * step.weight_decay);
  } else if (step.weight_decay != 0) {
    grad = grad + of.param * step.weight_decay;
  }
  of.avg.add_(grad - of.avg, 1 - step.beta1);
  of.sq.mul_(step.beta2).addcmul_(grad, grad, 1 - step.beta2);
  if (of.max_sq.defined()) of.max_sq.copy_(at::maximum(of.max_sq, of.sq));
  const at::Tensor root = (of.max_sq.defined() ? of.max_sq : of.sq).sqrt();
  of.param.addcdiv_(of.avg, root.div_(std::sqrt(step.correction2)).add_(step.eps), -step.lr / step.correction1);
}

// Returns the one element of a tensor.
double number_of(const char* op, const char* what, const AnyTensor& tensor) {
  const at::Tensor number =
      tensor.dtensor() != nullptr ? tensor.dtensor()->redistribute({}, false).local_tensor() : tensor.plain();
  if (!number.defined() || number.numel() != 1) {
    fail(ErrorCode::invalid_argument, "{}: {} has {} elements, expected one", op, what,
         number.defined() ? std::to_string(number.numel()) : "no");
  }
  return number.item<double>();
}

void check_lists(const char* op, const FusedAdamTensors& tensors, const FusedAdamOptions& options) {
  const auto check_length = [&](const char* list, std::size_t found, std::size_t expected) {
    if (found == expected) return;
    fail(ErrorCode::invalid_argument, "{}: {} {}, expected {}, for {} parameters", op, found, list, expected,
         tensors.params.size());
  };
  const std::size_t count = tensors.params.size();
  check_length("grads", tensors.grads.size(), count);
  check_length("exp_avgs", tensors.exp_avgs.size(), count);
  check_length("exp_avg_sqs", tensors.exp_avg_sqs.size(), count);
  check_length("max_exp_avg_sqs", tensors.max_exp_avg_sqs.size(), options.amsgrad ? count : 0);
  check_length("state_steps", tensors.state_steps.size(), count);
  for (std::size_t i = 0; i < count; ++i) {
    const DTensor& param = tensors.params[i];
    for (const auto* list : {&tensors.exp_avgs, &tensors.exp_avg_sqs, &tensors.max_exp_avg_sqs}) {
      if (list->empty()) continue;
      const DTensor& state = (*list)[i];
      const bool fits = state.device_mesh() == param.device_mesh() && state.layout() == param.layout() &&
                        state.scalar_type() == param.scalar_type();
      if (fits) continue;
      fail(ErrorCode::invalid_argument, "{}: average {} is a {} of {}, expected it as its parameter, a {} of {}", op, i,
           state.to_string(), c10::toString(state.scalar_type()), param.to_string(),
           c10::toString(param.scalar_type()));
    }
  }
}

void fused_step(const char* op, const FusedAdamTensors& tensors, const FusedAdamOptions& options, Decay decay) {
  check_lists(op, tensors, options);
  const c10::NoGradGuard no_grad;
  if (options.found_inf && number_of(op, "found_inf", *options.found_inf) != 0) return;
  AdamStep step = {};
  step.beta1 = options.beta1, step.beta2 = options.beta2, step.eps = options.eps;
  step.weight_decay = options.weight_decay;
  step.decay = decay;
  step.grad_factor = options.maximize ? -1 : 1;
  if (options.grad_scale) step.grad_factor /= number_of(op, "grad_scale", *options.grad_scale);
  step.lr = std::holds_alternative<double>(options.lr) ? std::get<double>(options.lr)
                                                       : number_of(op, "lr", std::get<AnyTensor>(options.lr));
  for (std::size_t i = 0; i < tensors.params.size(); ++i) {
    const double count = number_of(op, "a step", tensors.state_steps[i]);
    step.correction1 = 1 - std::pow(options.beta1, count);
    step.correction2 = 1 - std::pow(options.beta2, count);
    const std::vector<DTensor> inputs = {tensors.params[i], tensors.grads[i]};
    call_in_place(
        op, inputs, [&](auto given) { return rules::elementwise(op, given, rules::Linearity::none); },
        [&](std::span<const DTensor> placed) -> at::Tensor {
          const AdamLocals locals = {placed[0].local_tensor(), placed[1].local_tensor(),
                                     tensors.exp_avgs[i].local_tensor(), tensors.exp_avg_sqs[i].local_tensor(),
                                     options.amsgrad ? tensors.max_exp_avg_sqs[i].local_tensor() : at::Tensor()};
          if (locals.are_alike(at::kFloat)) {
            step_in_one_pass<float>(locals, step);
          } else if (locals.are_alike(at::kDouble)) {
            step_in_one_pass<double>(locals, step);
          } else {
            step_by_ops(locals, step);
          }
          return locals.param;
        });
  }
}

}  // namespace

void fused_adam_(const FusedAdamTensors& tensors, const FusedAdamOptions& options) {
  fused_step("fused_adam_", tensors, options, Decay::of_gradient);
}

void fused_adamw_(const FusedAdamTensors& tensors, const FusedAdamOptions& options) {
  fused_step("fused_adamw_", tensors, options, Decay::of_weight);
}

}  // namespace tessera::dtensor
