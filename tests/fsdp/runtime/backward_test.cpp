// When the backward of a unit is over: at the same calls on all ranks, whatever differs between them, and before
// anything else needs the memory.

#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/grads.h"
#include "fsdp/small_model.h"
#include "support/error_matchers.h"
#include "tessera/comm/local_ranks.h"
#include "tessera/fsdp/activation_checkpoint.h"

namespace tessera::fsdp {
namespace {

using CallOfModel = std::function<at::Tensor(const at::Tensor& x)>;

// Computes gradients on 2 ranks by `step(call, model, rank)`, where `call` calls the model, and compares them with
// those of one process. `make` makes the model of a rank.
template <typename Make, typename Step>
void expect_same_gradients_as_alone(const Make& make, const Step& step) {
  auto expected = make(0);
  const std::vector<at::Tensor> params = expected->parameters();
  for (const int rank : {0, 1}) {
    auto alone = make(rank);
    step(CallOfModel([&](const at::Tensor& x) { return alone->forward(x); }), *alone, rank);
    for (std::size_t i = 0; i < params.size(); ++i) {
      if (!params[i].requires_grad()) continue;
      at::Tensor& sum = params[i].mutable_grad();
      if (!sum.defined()) sum = at::zeros_like(params[i]).detach();
      const at::Tensor grad = alone->parameters()[i].grad();
      if (grad.defined()) sum.add_(grad, 0.5);
    }
  }
  const bool are_some_frozen =
      std::any_of(params.begin(), params.end(), [](const at::Tensor& param) { return !param.requires_grad(); });
  run_local(2, [&](const ProcessGroup& group) {
    for (const Options& way : kWays) {
      if (are_some_frozen && !way.use_orig_params) continue;
      FullyShardedDataParallel<decltype(make(0))> model(make(group.rank()), group, way);
      for (int times = 0; times < 2; ++times) {
        model.zero_grad();
        step(CallOfModel([&](const at::Tensor& x) { return model(x); }), *model.operator->(), group.rank());
        expect_same_grads(unsharded_grads(model), *expected);
        for (std::size_t i = 0; i < model.unit_count(); ++i) {
          EXPECT_FALSE(model.handle(i).is_gathered() && is_sharded(way.strategy)) << model.unit_name(i);
        }
      }
    }
  });
}

void step_once(const CallOfModel& call, torch::nn::Module& /*model*/, int rank) {
  loss_of(call(batch_of(0, rank))).backward();
}

// A layer with a part that only some calls use, and that may throw.
struct SometimesImpl : torch::nn::Module {
  SometimesImpl() {
    always = register_module("always", torch::nn::Linear(5, 5));
    extra = register_module("extra", torch::nn::Linear(5, 5));
  }
  at::Tensor forward(const at::Tensor& x, bool uses_extra) {
    if (throws) throw std::runtime_error("in forward");
    const at::Tensor y = at::tanh(always(x));
    return uses_extra ? y + extra(x) : y;
  }
  torch::nn::Linear always{nullptr}, extra{nullptr};
  bool throws = false;
};
TORCH_MODULE(Sometimes);

struct UseOfLayer {
  std::size_t layer;
  bool uses_extra;
};

// Calls its four layers in an order.
template <typename Layer>
struct SometimesStackImpl : torch::nn::Module {
  explicit SometimesStackImpl(std::vector<UseOfLayer> uses_in) : uses(std::move(uses_in)) {
    for (int i = 0; i < 4; ++i) layers.push_back(register_module("layer" + std::to_string(i), Layer()));
  }
  at::Tensor forward(at::Tensor x) {
    for (const UseOfLayer& use : uses) x = layers[use.layer]->forward(x, use.uses_extra);
    return x;
  }
  std::vector<Layer> layers;
  std::vector<UseOfLayer> uses;
};

template <typename Layer>
auto make_sometimes(const std::vector<UseOfLayer>& uses) {
  const auto model = std::make_shared<SometimesStackImpl<Layer>>(uses);
  fill(*model);
  return torch::nn::ModuleHolder<SometimesStackImpl<Layer>>(model);
}

// Returns a model of which only rank 0 uses all parameters.
auto make_sometimes(int rank) {
  return make_sometimes<Wrap<Sometimes>>({{0, true}, {1, true}, {2, rank == 0}, {3, true}});
}
const auto kMakeSometimes = [](int rank) { return make_sometimes(rank); };

TEST(BackwardOrderTest, ForwardsWithoutABackwardDoNotChangeTheNextOne) {
  expect_same_gradients_as_alone(kMakeSometimes, step_once);
  expect_same_gradients_as_alone(kMakeSometimes, [](const CallOfModel& call, auto& model, int rank) {
    const at::Tensor batch = batch_of(3, rank);
    call(batch);
    model.layers.back()->throws = true;
    EXPECT_THROW(call(batch), std::runtime_error);
    model.layers.back()->throws = false;
    step_once(call, model, rank);
  });
}

// If a parameter is frozen, only the order of calls tells when the backward of a unit is over.
TEST(BackwardOrderTest, ResultsMayBeKeptOnSomeRanks) {
  for (const bool freezes : {false, true}) {
    const auto make = [freezes](int rank) {
      auto model = make_sometimes(rank);
      for (Wrap<Sometimes>& layer : model->layers) layer->always->bias.set_requires_grad(!freezes);
      return model;
    };
    expect_same_gradients_as_alone(make, [](const CallOfModel& call, auto& model, int rank) {
      std::vector<at::Tensor> kept;
      for (const bool is_kept : {rank == 0, rank == 1, true}) {
        at::Tensor result = call(batch_of(3, rank));
        if (is_kept) kept.push_back(std::move(result));
      }
      step_once(call, model, rank);
    });
  }
}

TEST(BackwardOrderTest, TwoForwardsMayHaveOneBackwardOrTwoInAnyOrder) {
  for (const bool is_one : {true, false}) {
    for (const bool is_first_first : {true, false}) {
      expect_same_gradients_as_alone(kMakeSometimes, [&](const CallOfModel& call, auto& /*model*/, int rank) {
        const at::Tensor first = loss_of(call(batch_of(0, rank))), second = loss_of(call(batch_of(1, rank)));
        const at::Tensor &one = is_first_first ? first : second, &other = is_first_first ? second : first;
        if (is_one) return (one + other).backward();
        one.backward();
        other.backward();
      });
    }
  }
}

TEST(BackwardOrderTest, AGraphMayBeRetained) {
  expect_same_gradients_as_alone(kMakeSometimes, [](const CallOfModel& call, auto& /*model*/, int rank) {
    const at::Tensor result = call(batch_of(0, rank));
    loss_of(result).backward({}, /*keep_graph=*/true);
    result.sum().backward();
  });
}

TEST(BackwardOrderTest, AUnitMayBeCalledAgainAndUseOtherParametersThen) {
  const auto uses = [](int rank) {
    return std::vector<UseOfLayer>{{0, true},  {1, true},      {2, rank == 0}, {3, true},
                                   {1, false}, {1, rank == 0}, {2, true},      {1, rank == 1}};
  };
  expect_same_gradients_as_alone([&](int rank) { return make_sometimes<Wrap<Sometimes>>(uses(rank)); }, step_once);
  expect_same_gradients_as_alone([&](int rank) { return make_sometimes<Wrap<Checkpointed<Sometimes>>>(uses(rank)); },
                                 step_once);
  expect_same_gradients_as_alone([&](int rank) { return make_sometimes<Checkpointed<Wrap<Sometimes>>>(uses(rank)); },
                                 step_once);
}

// On rank 0, all parameters of the model's own unit have their gradients before backward reaches the other units.
struct HeadsImpl : torch::nn::Module {
  explicit HeadsImpl(bool uses_both_in) : uses_both(uses_both_in) {
    for (int i = 0; i < 3; ++i)
      layers.push_back(register_module("layer" + std::to_string(i), Wrap<torch::nn::Linear>(5, 5)));
    head = register_module("head", torch::nn::Linear(5, 3));
    other = register_module("other", torch::nn::Linear(5, 3));
  }
  at::Tensor forward(at::Tensor x) {
    for (Wrap<torch::nn::Linear>& layer : layers) x = at::tanh(layer(x));
    return uses_both ? head(x) + other(x) : head(x);
  }
  std::vector<Wrap<torch::nn::Linear>> layers;
  torch::nn::Linear head{nullptr}, other{nullptr};
  bool uses_both;
};
TORCH_MODULE(Heads);

TEST(BackwardOrderTest, AUnitThatContainsOthersMayHaveAllGradientsBeforeThemOnSomeRanks) {
  const auto make = [](int rank) {
    Heads model(rank == 0);
    fill(*model);
    return model;
  };
  expect_same_gradients_as_alone(make, step_once);
}

// --- backwards and forwards inside of a backward

// Calls a function in the middle of its backward.
struct TellingImpl : BlockImpl {
  explicit TellingImpl(std::function<void()> in_backward_in) : BlockImpl(5), in_backward(std::move(in_backward_in)) {}
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor y = at::tanh(up(x));
    if (y.requires_grad()) y.register_hook([this](const at::Tensor&) { in_backward(); });
    return x + down(y);
  }
  std::function<void()> in_backward;
};
TORCH_MODULE(Telling);

struct InterruptedImpl : torch::nn::Module {
  InterruptedImpl() {
    for (int i = 0; i < 3; ++i) layers.push_back(register_module("layer" + std::to_string(i), Wrap<Block>(5)));
    telling = register_module("telling", Wrap<Telling>(std::function<void()>([this] {
                                if (const auto f = std::exchange(interruption, nullptr)) f();
                              })));
  }
  at::Tensor forward(const at::Tensor& x) { return layers[2](telling(layers[1](layers[0](x)))); }
  std::vector<Wrap<Block>> layers;
  Wrap<Telling> telling{nullptr};
  std::function<void()> interruption;  // called once
};
TORCH_MODULE(Interrupted);

Interrupted make_interrupted(int /*rank*/) {
  Interrupted model;
  fill(*model);
  return model;
}

TEST(InterruptedBackwardTest, AHookMayComputeTheBackwardOfAnotherForward) {
  for (const bool is_of_earlier : {true, false}) {
    expect_same_gradients_as_alone(make_interrupted, [&](const CallOfModel& call, InterruptedImpl& model, int rank) {
      const at::Tensor first = loss_of(call(batch_of(0, rank))), second = loss_of(call(batch_of(1, rank)));
      model.interruption = [&] { (is_of_earlier ? first : second).backward(); };
      (is_of_earlier ? second : first).backward();
      EXPECT_FALSE(model.interruption);
    });
  }
}

TEST(InterruptedBackwardTest, AHookMayCallTheModel) {
  expect_same_gradients_as_alone(make_interrupted, [](const CallOfModel& call, InterruptedImpl& model, int rank) {
    const auto evaluate = [&] {
      const at::NoGradGuard no_grad;
      return call(batch_of(2, rank));
    };
    const at::Tensor expected = evaluate(), loss = loss_of(call(batch_of(0, rank)));
    at::Tensor found;
    model.interruption = [&] { found = evaluate(); };
    loss.backward();
    EXPECT_TRUE(at::equal(found, expected));
  });
}

TEST(InterruptedBackwardTest, AHookMayTrainTheModel) {
  expect_same_gradients_as_alone(make_interrupted, [](const CallOfModel& call, InterruptedImpl& model, int rank) {
    model.interruption = [&] {
      const at::AutoGradMode graph(true);
      loss_of(call(batch_of(1, rank))).backward();
    };
    loss_of(call(batch_of(0, rank))).backward();
    EXPECT_FALSE(model.interruption);
  });
}

struct DifferentiatesImpl : torch::nn::Module {
  DifferentiatesImpl() { linear = register_module("linear", Wrap<torch::nn::Linear>(5, 5)); }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor y = linear(x);
    return differentiates ? torch::autograd::grad({y.sum()}, {x}, {}, /*retain_graph=*/true).front() : y;
  }
  Wrap<torch::nn::Linear> linear{nullptr};
  bool differentiates = true;
};
TORCH_MODULE(Differentiates);

TEST(InterruptedForwardTest, ABackwardInForwardIsRefused) {
  run_local(2, [](const ProcessGroup& group) {
    FullyShardedDataParallel<Differentiates> model(Differentiates(), group);
    const at::Tensor x = at::ones({2, 5}).requires_grad_();
    for (int times = 0; times < 2; ++times) {
      model->differentiates = true;
      EXPECT_ERROR(model(x), ErrorCode::unsupported, "backward of a sharded model: called in forward of the model");
      model->differentiates = false;
      model.zero_grad();
      model(x).sum().backward();
      EXPECT_TRUE(at::equal(unsharded_grads(model)[1], at::full({5}, 2.0)));
    }
  });
}

// --- memory

TEST(BackwardMemoryTest, UnitsAreFreedBeforeBackwardLeavesTheModel) {
  run_local(2, [](const ProcessGroup& group) {
    for (const Options& way : kWays) {
      if (!is_sharded(way.strategy)) continue;
      FullyShardedDataParallel<Interrupted> model(make_interrupted(0), group, way);
      int calls = 0;
      for (int step = 0; step < 2; ++step) {
        const at::Tensor before = batch_of(step, group.rank()).requires_grad_() * 1.5, x = before * 1.5;
        before.register_hook([&](const at::Tensor&) {
          ++calls;
          for (std::size_t i = 0; i < model.unit_count(); ++i) {
            EXPECT_FALSE(model.handle(i).is_gathered()) << model.unit_name(i);
          }
        });
        loss_of(model(x)).backward();
      }
      EXPECT_EQ(calls, 2);
    }
  });
}

}  // namespace
}  // namespace tessera::fsdp
