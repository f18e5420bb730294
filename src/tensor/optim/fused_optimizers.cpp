#include "tessera/tensor/optim/fused_optimizers.h"

#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <c10/util/StringUtil.h>

#include <memory>
#include <vector>

#include "tensor/optim/adam_step.h"
#include "tessera/base/error.h"
#include "tessera/tensor/internal/optimizer_key.h"

namespace tessera {

namespace {

void check_gradients(const char* optimizer, const std::vector<torch::optim::OptimizerParamGroup>& groups) {
  for (const torch::optim::OptimizerParamGroup& group : groups) {
    for (const at::Tensor& param : group.params()) {
      if (!param.grad().defined() || param.grad().layout() == at::kStrided) continue;
      fail(ErrorCode::unsupported, "{}: a gradient with layout {}, expected a dense one", optimizer,
           c10::str(param.grad().layout()));
    }
  }
}

// Checks that the states have what amsgrad needs; those of a training without it do not.
template <typename Options, typename State>
void check_states(const char* name, torch::optim::Optimizer& optimizer) {
  for (const torch::optim::OptimizerParamGroup& group : optimizer.param_groups()) {
    if (!static_cast<const Options&>(group.options()).amsgrad()) continue;
    for (const at::Tensor& param : group.params()) {
      const auto kept = optimizer.state().find(optimizer_key(param));
      if (!param.grad().defined() || kept == optimizer.state().end() || kept->second == nullptr) continue;
      if (static_cast<const State&>(*kept->second).max_exp_avg_sq().defined()) continue;
      fail(ErrorCode::invalid_argument,
           "{}: the state of a parameter has no max_exp_avg_sq, expected the state of a training with amsgrad", name);
    }
  }
}

at::Tensor zeros_as(const at::Tensor& param) { return at::zeros_like(param, at::MemoryFormat::Preserve); }

// Steps all parameters of `optimizer`, whose options and states are of these classes.
template <typename Options, typename State, typename Optimizer>
at::Tensor fused_step(Optimizer& optimizer, const char* name, AdamDecay decay,
                      const torch::optim::Optimizer::LossClosure& closure) {
  at::Tensor loss;
  if (closure) {
    const at::AutoGradMode with_grad(true);
    loss = closure();
  }
  const c10::NoGradGuard no_grad;
  check_gradients(name, optimizer.param_groups());
  check_states<Options, State>(name, optimizer);
  for (torch::optim::OptimizerParamGroup& group : optimizer.param_groups()) {
    const auto& options = static_cast<const Options&>(group.options());
    AdamStep step = {};
    step.lr = options.lr();
    step.beta1 = std::get<0>(options.betas());
    step.beta2 = std::get<1>(options.betas());
    step.eps = options.eps();
    step.weight_decay = options.weight_decay();
    step.grad_factor = 1;
    step.decay = decay;
    for (const at::Tensor& param : group.params()) {
      if (!param.grad().defined()) continue;
      auto& kept = optimizer.state()[optimizer_key(param)];
      if (kept == nullptr) {
        auto made = std::make_unique<State>();
        made->step(0);
        made->exp_avg(zeros_as(param));
        made->exp_avg_sq(zeros_as(param));
        if (options.amsgrad()) made->max_exp_avg_sq(zeros_as(param));
        kept = std::move(made);
      }
      auto& state = static_cast<State&>(*kept);
      state.step(state.step() + 1);
      step.correct(static_cast<double>(state.step()));
      adam_step({param, param.grad(), state.exp_avg(), state.exp_avg_sq(),
                 options.amsgrad() ? state.max_exp_avg_sq() : at::Tensor()},
                step);
    }
  }
  return loss;
}

}  // namespace

at::Tensor FusedAdam::step(LossClosure closure) {
  using namespace torch::optim;
  return fused_step<AdamOptions, AdamParamState>(*this, "FusedAdam", AdamDecay::of_gradient, closure);
}

at::Tensor FusedAdamW::step(LossClosure closure) {
  using namespace torch::optim;
  return fused_step<AdamWOptions, AdamWParamState>(*this, "FusedAdamW", AdamDecay::of_weight, closure);
}

}  // namespace tessera
