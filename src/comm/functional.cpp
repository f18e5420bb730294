#include "tessera/comm/functional.h"

#include <torch/csrc/autograd/custom_function.h>

#include <functional>
#include <numeric>
#include <utility>
#include <vector>

namespace tessera::functional {

namespace {

using Splits = std::vector<std::int64_t>;
using Step = std::function<at::Tensor(const at::Tensor&)>;

// So that autograd's context can keep one.
struct StepHolder : torch::CustomClassHolder {
  explicit StepHolder(Step step_in) : step(std::move(step_in)) {}
  Step step;
};

// A linear function of one tensor; `backward` makes the gradient of the input from that of the result.
struct Linear : torch::autograd::Function<Linear> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& input, const Step& forward,
                            const Step& backward) {
    context->saved_data["backward"] = c10::IValue::make_capsule(c10::make_intrusive<StepHolder>(backward));
    return forward(input);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const auto holder = c10::static_intrusive_pointer_cast<StepHolder>(context->saved_data["backward"].toCapsule());
    return {holder->step(gradients[0]), at::Tensor(), at::Tensor()};
  }
};

at::Tensor rows_like(const at::Tensor& tensor, std::int64_t rows) {
  std::vector<std::int64_t> sizes = tensor.sizes().vec();
  sizes[0] = rows;
  return at::empty(sizes, tensor.options().requires_grad(false));
}

at::Tensor gathered(const ProcessGroup& group, const at::Tensor& tensor) {
  at::Tensor out = rows_like(tensor, tensor.size(0) * group.size());
  group.all_gather_into(out, tensor.contiguous());
  return out;
}

at::Tensor reduced_and_scattered(const ProcessGroup& group, const at::Tensor& tensor) {
  at::Tensor out = rows_like(tensor, tensor.size(0) / group.size());
  group.reduce_scatter_into(out, tensor.contiguous());
  return out;
}

at::Tensor summed(const ProcessGroup& group, const at::Tensor& tensor) {
  at::Tensor sum = tensor.clone(at::MemoryFormat::Contiguous);
  group.all_reduce(sum);
  return sum;
}

at::Tensor exchanged(const ProcessGroup& group, const at::Tensor& tensor, const Splits& out_splits,
                     const Splits& in_splits) {
  at::Tensor out = rows_like(tensor, std::accumulate(out_splits.begin(), out_splits.end(), std::int64_t{0}));
  std::int64_t row = 1;
  for (const std::int64_t size : tensor.sizes().slice(1)) row *= size;
  const auto elements = [row](Splits rows) {
    for (std::int64_t& count : rows) count *= row;
    return rows;
  };
  group.all_to_all(out, tensor.contiguous(), elements(out_splits), elements(in_splits));
  return out;
}

}  // namespace

at::Tensor all_gather(const ProcessGroup& group, const at::Tensor& input) {
  return Linear::apply(
      input, [&](const at::Tensor& x) { return gathered(group, x); },
      [group](const at::Tensor& gradient) { return reduced_and_scattered(group, gradient); });
}

at::Tensor reduce_scatter(const ProcessGroup& group, const at::Tensor& input) {
  return Linear::apply(
      input, [&](const at::Tensor& x) { return reduced_and_scattered(group, x); },
      [group](const at::Tensor& gradient) { return gathered(group, gradient); });
}

at::Tensor all_reduce(const ProcessGroup& group, const at::Tensor& input) {
  return Linear::apply(
      input, [&](const at::Tensor& x) { return summed(group, x); },
      [group](const at::Tensor& gradient) { return summed(group, gradient); });
}

at::Tensor all_to_all(const ProcessGroup& group, const at::Tensor& input, std::span<const std::int64_t> out_splits,
                      std::span<const std::int64_t> in_splits) {
  const Splits out(out_splits.begin(), out_splits.end()), in(in_splits.begin(), in_splits.end());
  return Linear::apply(
      input, [&](const at::Tensor& x) { return exchanged(group, x, out, in); },
      [group, out, in](const at::Tensor& gradient) { return exchanged(group, gradient, in, out); });
}

at::Tensor sum_gradients(const ProcessGroup& group, const at::Tensor& input) {
  return Linear::apply(
      input, [](const at::Tensor& x) { return x.view_as(x); },
      [group](const at::Tensor& gradient) { return summed(group, gradient); });
}

}  // namespace tessera::functional
