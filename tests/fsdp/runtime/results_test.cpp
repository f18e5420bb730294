// Results of units: views, results that are changed in place, and tensors that a unit returns but has not computed.

#include <gtest/gtest.h>
#include <torch/csrc/autograd/function.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/grads.h"
#include "fsdp/small_model.h"
#include "tessera/comm/comm_debug_mode.h"
#include "tessera/comm/local_ranks.h"

namespace tessera::fsdp {
namespace {

// Returns a view, as at::linear does if its input has three dimensions.
struct ReturnsViewImpl : torch::nn::Module {
  explicit ReturnsViewImpl(std::int64_t width) { linear = register_module("linear", torch::nn::Linear(5, width)); }
  at::Tensor forward(const at::Tensor& x) { return linear(x.reshape({-1, 5})).view({2, 2, -1}); }
  torch::nn::Linear linear{nullptr};
};
TORCH_MODULE(ReturnsView);

// Changes the results of its layers in place.
struct ChangesResultsImpl : torch::nn::Module {
  explicit ChangesResultsImpl(std::size_t frozen_layers) {
    for (int i = 0; i < 3; ++i) layers.push_back(register_module("layer" + std::to_string(i), Wrap<ReturnsView>(5)));
    head = register_module("head", ReturnsView(3));
    fill(*this);
    for (std::size_t i = 0; i < frozen_layers; ++i) {
      for (const at::Tensor& param : layers[i]->parameters()) param.set_requires_grad(false);
    }
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor y = layers[0](x);
    y.add_(x);
    y = layers[1](y);
    at::relu_(y);
    y = layers[2](y);
    y.mul_(x);
    return head(y);
  }
  std::vector<Wrap<ReturnsView>> layers;
  ReturnsView head{nullptr};
};
TORCH_MODULE(ChangesResults);

// Compares the gradients of a rank's inputs with those that were added first.
class InputGradients {
 public:
  void add(const at::Tensor& input, int rank) {
    at::Tensor& expected = expected_[static_cast<std::size_t>(rank)];
    if (!expected.defined()) expected = input.grad();
    EXPECT_TRUE(at::allclose(input.grad(), expected, 1e-12, 1e-14));
  }

 private:
  std::array<at::Tensor, 2> expected_;
};

TEST(ResultTest, AProgramMayChangeViewsInPlace) {
  for (const std::size_t frozen : {0u, 2u, 3u}) {
    InputGradients gradients;
    expect_same_gradients_as_alone([frozen](int /*rank*/) { return ChangesResults(frozen); },
                                   [&](const CallOfModel& call, auto& /*model*/, int rank) {
                                     const at::Tensor x = batch_of(0, rank).reshape({2, 2, 5}).requires_grad_();
                                     const at::Tensor result = call(x);
                                     result.masked_fill_(at::arange(12).reshape({2, 2, 3}).remainder(2).eq(0), 0.25);
                                     loss_of(result).backward();
                                     gradients.add(x, rank);
                                   });
  }
}

// Changes the result of the unit in it, which is a result of this one then.
struct ScalesInPlaceImpl : torch::nn::Module {
  ScalesInPlaceImpl() {
    inner = register_module("inner", Wrap<torch::nn::Linear>(5, 5));
    factors = register_parameter("factors", at::ones({5}));
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor y = inner(x);
    y.mul_(factors);
    return y;
  }
  Wrap<torch::nn::Linear> inner{nullptr};
  at::Tensor factors;
};
TORCH_MODULE(ScalesInPlace);

TEST(ResultTest, AUnitMayChangeTheResultOfAnotherOneInPlaceAndReturnIt) {
  const auto make = [](int /*rank*/) {
    torch::nn::Sequential model{Wrap<ScalesInPlace>(), Wrap<ScalesInPlace>()};
    fill(*model);
    return model;
  };
  for (const bool are_views : {false, true}) {
    expect_same_gradients_as_alone(make, [&](const CallOfModel& call, auto& /*model*/, int rank) {
      const at::Tensor x = batch_of(0, rank);
      loss_of(call(are_views ? x.reshape({2, 2, 5}) : x)).backward();
    });
  }
}

// Returns its argument, or what its block computes of it.
struct SkipsImpl : torch::nn::Module {
  SkipsImpl() { block = register_module("block", Block(5)); }
  at::Tensor forward(const at::Tensor& x, bool skips) { return skips ? x : block(x); }
  Block block{nullptr};
};
TORCH_MODULE(Skips);

struct SkippedImpl : torch::nn::Module {
  SkippedImpl() {
    first = register_module("first", Wrap<Skips>());
    second = register_module("second", Wrap<Skips>());
    fill(*this);
  }
  at::Tensor forward(const at::Tensor& x) { return first(second(first(x, true), false), false); }
  Wrap<Skips> first{nullptr}, second{nullptr};
};
TORCH_MODULE(Skipped);

// The gradient of a leaf is accumulated before others that the same op has.
TEST(ResultTest, AUnitMayReturnItsArgumentThatNeedsAGradient) {
  for (const bool is_leaf : {true, false}) {
    InputGradients gradients;
    expect_same_gradients_as_alone([](int /*rank*/) { return Skipped(); },
                                   [&](const CallOfModel& call, auto& /*model*/, int rank) {
                                     const at::Tensor x = batch_of(0, rank).requires_grad_();
                                     loss_of(call(is_leaf ? x : x * 1.5)).backward();
                                     gradients.add(x, rank);
                                   });
  }
}

TEST(ResultTest, ATensorThatIsPassedOrReturnedInManyCallsHasOneHook) {
  FullyShardedDataParallel<Skipped> model{Skipped()};
  const at::Tensor x = batch_of(0, 0).requires_grad_() * 1.5;
  const auto count_hooks = [&] { return x.grad_fn()->pre_hooks().size(); };
  model(x);
  const std::size_t hooks = count_hooks();
  EXPECT_GT(hooks, 0u);
  for (int times = 0; times < 3; ++times) model(x);
  EXPECT_EQ(count_hooks(), hooks);
}

// Also returns the prompt.
struct PromptedImpl : torch::nn::Module {
  PromptedImpl() { linear = register_module("linear", torch::nn::Linear(5, 5)); }
  std::pair<at::Tensor, at::Tensor> forward(const at::Tensor& x, const at::Tensor& prompt) {
    return {at::tanh(linear(x + prompt)), prompt};
  }
  torch::nn::Linear linear{nullptr};
};
TORCH_MODULE(Prompted);

struct PromptedModelImpl : torch::nn::Module {
  PromptedModelImpl() {
    prompt = register_parameter("prompt", at::ones({5}));
    for (int i = 0; i < 3; ++i) layers.push_back(register_module("layer" + std::to_string(i), Wrap<Prompted>()));
    fill(*this);
  }
  at::Tensor forward(const at::Tensor& x) {
    std::pair<at::Tensor, at::Tensor> state{x, prompt};
    for (Wrap<Prompted>& layer : layers) state = layer(state.first, state.second);
    return state.first;
  }
  at::Tensor prompt;
  std::vector<Wrap<Prompted>> layers;
};
TORCH_MODULE(PromptedModel);

TEST(ResultTest, UnitsThatReturnAnIgnoredParameterCommunicateTheSameInEachStep) {
  run_local(2, [](const ProcessGroup& group) {
    for (Options way : kWays) {
      const PromptedModel plain;
      way.ignored_parameters = {plain->prompt};
      FullyShardedDataParallel<PromptedModel> model(plain, group, way);
      std::vector<std::map<std::string, std::int64_t>> counts;
      for (int step = 0; step < 4; ++step) {
        model.zero_grad();
        const CommDebugMode mode(group);
        loss_of(model(batch_of(step, group.rank()))).backward();
        counts.push_back(mode.counts());
        EXPECT_TRUE(plain->prompt.grad().defined());
      }
      EXPECT_EQ(counts[2], counts[1]);
      EXPECT_EQ(counts[3], counts[1]);
    }
  });
}

}  // namespace
}  // namespace tessera::fsdp
