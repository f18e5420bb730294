#include "tensor/optim/adam_step.h"

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/maximum.h>

#include <algorithm>

#include "tessera/tensor/internal/bump_version.h"

namespace tessera {

namespace {

// Returns whether all are of `dtype` on CPU, and the same place in memory is the same element in each.
bool are_alike(const AdamLocals& of, at::ScalarType dtype) {
  bool alike = of.param.is_non_overlapping_and_dense();
  for (const at::Tensor* tensor : {&of.param, &of.grad, &of.avg, &of.sq, &of.max_sq}) {
    if (!tensor->defined()) continue;
    alike = alike && tensor->layout() == at::kStrided && tensor->is_cpu() && tensor->scalar_type() == dtype &&
            tensor->strides() == of.param.strides();
  }
  return alike;
}

// Parameters may be infinite, as those of a mask are. So without decay, nothing multiplies them by a decay of 0, which
// gives NaN.
template <typename T, bool kDecaysGradient>
void one_pass(const AdamLocals& of, const AdamStep& step) {
  T *param = of.param.data_ptr<T>(), *avg = of.avg.data_ptr<T>(), *sq = of.sq.data_ptr<T>();
  T* max_sq = of.max_sq.defined() ? of.max_sq.data_ptr<T>() : nullptr;
  const T* grad = of.grad.data_ptr<T>();
  const auto beta2 = static_cast<T>(step.beta2), eps = static_cast<T>(step.eps);
  const auto rest1 = static_cast<T>(1 - step.beta1), rest2 = static_cast<T>(1 - step.beta2);
  const auto decay = static_cast<T>(step.weight_decay), factor = static_cast<T>(step.grad_factor);
  const auto keep = static_cast<T>(step.decay == AdamDecay::of_weight ? 1 - step.lr * step.weight_decay : 1);
  const auto rate = static_cast<T>(step.lr / step.correction1), root2 = static_cast<T>(std::sqrt(step.correction2));
  constexpr std::int64_t kElementsOfAThread = 32768;
  at::parallel_for(0, of.param.numel(), kElementsOfAThread, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const T p = param[i] * keep;
      T g = grad[i] * factor;
      if constexpr (kDecaysGradient) g += decay * p;
      avg[i] += rest1 * (g - avg[i]);
      sq[i] = sq[i] * beta2 + rest2 * g * g;
      T greatest = sq[i];
      if (max_sq != nullptr) greatest = max_sq[i] = std::max(max_sq[i], sq[i]);
      param[i] = p - rate * avg[i] / (std::sqrt(greatest) / root2 + eps);
    }
  });
  for (const at::Tensor* changed : {&of.param, &of.avg, &of.sq, &of.max_sq}) bump_version(*changed);
}

template <typename T>
void step_in_one_pass(const AdamLocals& of, const AdamStep& step) {
  if (step.decay == AdamDecay::of_gradient && step.weight_decay != 0) {
    one_pass<T, true>(of, step);
  } else {
    one_pass<T, false>(of, step);
  }
}

void step_by_ops(const AdamLocals& of, const AdamStep& step) {
  at::Tensor grad = of.grad.to(of.param.scalar_type()) * step.grad_factor;
  if (step.decay == AdamDecay::of_weight) {
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

}  // namespace

void adam_step(const AdamLocals& of, const AdamStep& step) {
  if (are_alike(of, at::kFloat)) {
    step_in_one_pass<float>(of, step);
  } else if (are_alike(of, at::kDouble)) {
    step_in_one_pass<double>(of, step);
  } else {
    step_by_ops(of, step);
  }
}

}  // namespace tessera
