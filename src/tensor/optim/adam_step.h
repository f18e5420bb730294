#pragma once
// A step of Adam or AdamW for one parameter.

#include <ATen/core/Tensor.h>

#include <cmath>
#include <cstdint>

namespace tessera {

enum class AdamDecay : std::uint8_t { of_gradient, of_weight };

// The numbers of a step.
struct AdamStep {
  double lr, beta1, beta2, eps, weight_decay, correction1, correction2, grad_factor;
  AdamDecay decay;

  // Sets the corrections for the step with this number, from 1.
  void correct(double number) {
    correction1 = 1 - std::pow(beta1, number);
    correction2 = 1 - std::pow(beta2, number);
  }
};

// A parameter, its gradient and its averages; `max_sq` is undefined without amsgrad.
struct AdamLocals {
  at::Tensor param, grad, avg, sq, max_sq;
};

// Updates the parameter and the averages: in one pass if all are of float or double on CPU and stored alike, else by
// ops. Gradients must not be recorded.
void adam_step(const AdamLocals& of, const AdamStep& step);

}  // namespace tessera
