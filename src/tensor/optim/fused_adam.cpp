#include "tessera/tensor/optim/fused_adam.h"

#include <c10/core/GradMode.h>

#include <functional>
#include <span>
#include <string>

#include "tensor/dtensor/explicit_redistribution.h"
#include "tensor/dtensor_rules/rules.h"
#include "tensor/optim/adam_step.h"
#include "tessera/base/error.h"
#include "tessera/tensor/dtensor_op.h"

namespace tessera::dtensor {

namespace {

bool is_on_this_rank(const AnyTensor& tensor) {
  return tensor.dtensor() == nullptr || tensor.dtensor()->device_mesh().has_this_rank();
}

// Returns the one element of a tensor; 0 on a rank outside of its mesh, where no parameter uses it: check_on_this_rank.
double number_of(const char* op, const char* what, const AnyTensor& tensor) {
  if (!is_on_this_rank(tensor)) return 0;
  const at::Tensor number =
      tensor.dtensor() != nullptr ? redistributed_by_op(*tensor.dtensor()).local_tensor() : tensor.plain();
  if (!number.defined() || number.numel() != 1) {
    fail(ErrorCode::invalid_argument, "{}: {} has {} elements, expected one", op, what,
         number.defined() ? std::to_string(number.numel()) : "no");
  }
  return number.item<double>();
}

// Checks that this rank has the number if it has a part of the parameter.
void check_on_this_rank(const char* what, const AnyTensor& number, const DTensor& param) {
  if (is_on_this_rank(number) || !param.device_mesh().has_this_rank()) return;
  fail(ErrorCode::invalid_argument, "{} is a {}, which is not on this rank, expected it on all ranks of {}", what,
       number.dtensor()->to_string(), param.device_mesh().to_string());
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

void fused_step(const char* op, const FusedAdamTensors& tensors, const FusedAdamOptions& options, AdamDecay decay) {
  check_lists(op, tensors, options);
  const c10::NoGradGuard no_grad;
  if (options.found_inf && number_of(op, "found_inf", *options.found_inf) != 0) return;
  AdamStep step = {};
  step.beta1 = options.beta1, step.beta2 = options.beta2, step.eps = options.eps;
  step.weight_decay = options.weight_decay;
  step.decay = decay;
  step.grad_factor = options.maximize ? -1 : 1;
  if (options.grad_scale) step.grad_factor /= number_of(op, "grad_scale", *options.grad_scale);
  const auto* rate = std::get_if<AnyTensor>(&options.lr);
  step.lr = rate != nullptr ? number_of(op, "lr", *rate) : std::get<double>(options.lr);
  for (std::size_t i = 0; i < tensors.params.size(); ++i) {
    const double count = number_of(op, "a step", tensors.state_steps[i]);
    step.correct(count);
    const std::vector<DTensor> inputs = {tensors.params[i], tensors.grads[i]};
    call_in_place(
        op, inputs,
        [&](auto given) {
          if (rate != nullptr) check_on_this_rank("lr", *rate, given[0]);
          check_on_this_rank("the step", tensors.state_steps[i], given[0]);
          return rules::elementwise(op, given, rules::Linearity::none);
        },
        [&](std::span<const DTensor> placed) -> at::Tensor {
          const AdamLocals locals = {placed[0].local_tensor(), placed[1].local_tensor(),
                                     tensors.exp_avgs[i].local_tensor(), tensors.exp_avg_sqs[i].local_tensor(),
                                     options.amsgrad ? tensors.max_exp_avg_sqs[i].local_tensor() : at::Tensor()};
          adam_step(locals, step);
          return locals.param;
        });
  }
}

}  // namespace

void fused_adam_(const FusedAdamTensors& tensors, const FusedAdamOptions& options) {
  fused_step("fused_adam_", tensors, options, AdamDecay::of_gradient);
}

void fused_adamw_(const FusedAdamTensors& tensors, const FusedAdamOptions& options) {
  fused_step("fused_adamw_", tensors, options, AdamDecay::of_weight);
}

}  // namespace tessera::dtensor
