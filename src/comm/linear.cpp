#include "tessera/comm/internal/linear.h"

#include <torch/csrc/autograd/custom_function.h>

#include <utility>

namespace tessera::comm {

namespace {

using Step = std::function<at::Tensor(const at::Tensor&)>;

// Lets autograd's context keep a step.
struct StepHolder : torch::CustomClassHolder {
  explicit StepHolder(Step step_in) : step(std::move(step_in)) {}
  Step step;
};

struct Linear : torch::autograd::Function<Linear> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& input,
                            FunctionRef<at::Tensor(const at::Tensor&)> forward, Step backward) {
    context->saved_data["backward"] = c10::IValue::make_capsule(c10::make_intrusive<StepHolder>(std::move(backward)));
    return forward(input);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const auto holder = c10::static_intrusive_pointer_cast<StepHolder>(context->saved_data["backward"].toCapsule());
    return {holder->step(gradients[0]), at::Tensor(), at::Tensor()};
  }
};

}  // namespace

at::Tensor linear(const at::Tensor& input, FunctionRef<at::Tensor(const at::Tensor&)> forward, Step backward) {
  return Linear::apply(input, forward, std::move(backward));
}

}  // namespace tessera::comm
