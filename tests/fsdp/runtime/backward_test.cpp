// When the backward of a unit is over: at the same calls on all ranks, whatever differs between them, and before
// anything else needs the memory.

#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <cstdint>
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

std::function<void()> calling_once(std::function<void()>& function) {
  return [&function] {
    if (const auto f = std::exchange(function, nullptr)) f();
  };
}

template <typename Teller>
struct InterruptedByImpl : torch::nn::Module {
  InterruptedByImpl() {
    for (int i = 0; i < 3; ++i) layers.push_back(register_module("layer" + std::to_string(i), Wrap<Block>(5)));
    telling = register_module("telling", Teller(calling_once(interruption)));
  }
  at::Tensor forward(const at::Tensor& x) { return layers[2](telling->forward(layers[1](layers[0](x)))); }
  std::vector<Wrap<Block>> layers;
  Teller telling{nullptr};
  std::function<void()> interruption;  // called once
};

struct InterruptedImpl : InterruptedByImpl<Wrap<Telling>> {};
TORCH_MODULE(Interrupted);

// In the backward of a repeated call.
struct InterruptedInRepetitionImpl : InterruptedByImpl<Checkpointed<Wrap<Telling>>> {};
TORCH_MODULE(InterruptedInRepetition);

template <typename Model>
Model make_filled(int /*rank*/) {
  Model model;
  fill(*model);
  return model;
}

Interrupted make_interrupted(int rank) { return make_filled<Interrupted>(rank); }

Block make_filled_block() {
  Block block(5);
  fill(*block);
  return block;
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

TEST(InterruptedBackwardTest, AHookInARepeatedCallMayComputeTheBackwardOfAnotherForward) {
  for (const bool is_of_earlier : {true, false}) {
    expect_same_gradients_as_alone(
        make_filled<InterruptedInRepetition>, [&](const CallOfModel& call, auto& model, int rank) {
          const at::Tensor first = loss_of(call(batch_of(0, rank))), second = loss_of(call(batch_of(1, rank)));
          model.interruption = [&] { (is_of_earlier ? first : second).backward(); };
          (is_of_earlier ? second : first).backward();
          EXPECT_FALSE(model.interruption);
        });
  }
}

// Calls functions in the middle of the backward of two of its units.
struct TwiceInterruptedImpl : torch::nn::Module {
  TwiceInterruptedImpl() {
    in = register_module("in", Wrap<Block>(5));
    early = register_module("early", Wrap<Telling>(calling_once(in_early)));
    late = register_module("late", Wrap<Telling>(calling_once(in_late)));
    out = register_module("out", Wrap<Block>(5));
  }
  at::Tensor forward(const at::Tensor& x) { return out(late(early(in(x)))); }
  Wrap<Block> in{nullptr}, out{nullptr};
  Wrap<Telling> early{nullptr}, late{nullptr};
  std::function<void()> in_early, in_late;  // called once
};
TORCH_MODULE(TwiceInterrupted);

TEST(InterruptedBackwardTest, AHookMayInterruptTheBackwardThatAnotherOneComputes) {
  for (const bool is_of_earlier : {true, false}) {
    expect_same_gradients_as_alone(make_filled<TwiceInterrupted>,
                                   [&](const CallOfModel& call, TwiceInterruptedImpl& model, int rank) {
                                     std::vector<at::Tensor> losses;
                                     for (const int step : {0, 1, 2})
                                       losses.push_back(loss_of(call(batch_of(step, rank))));
                                     if (!is_of_earlier) std::swap(losses.front(), losses.back());
                                     model.in_early = [&] {
                                       model.in_late = [&] { losses[0].backward(); };
                                       losses[1].backward();
                                     };
                                     losses[2].backward();
                                     EXPECT_FALSE(model.in_early || model.in_late);
                                   });
  }
}

// Backward has shown the gradients of units to the hook before another backward reaches these units again.
TEST(InterruptedBackwardTest, GradientsThatAHookHasSeenAreAccumulatedFurther) {
  expect_same_gradients_as_alone(
      make_filled<TwiceInterrupted>,
      [](const CallOfModel& call, TwiceInterruptedImpl& model, int rank) {
        const at::Tensor first = loss_of(call(batch_of(0, rank))), second = loss_of(call(batch_of(1, rank)));
        model.in_early = [&] { first.backward(); };
        second.backward();
      },
      [](ShardedModule& model) { model.register_post_reduce_hook([](std::size_t) {}); });
}

// Computes gradients of a result in the middle of its model before backward reaches that result.
struct AuxiliaryImpl : torch::nn::Module {
  explicit AuxiliaryImpl(bool freezes) {
    for (int i = 0; i < 3; ++i) layers.push_back(register_module("layer" + std::to_string(i), Wrap<Block>(5)));
    for (const at::Tensor& param : layers[1]->parameters()) param.set_requires_grad(!freezes);
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor middle = layers[1](layers[0](x)), y = at::tanh(middle);
    if (y.requires_grad()) {
      loss = middle.sum();
      y.register_hook([this](const at::Tensor&) { std::exchange(loss, {}).backward({}, /*keep_graph=*/true); });
    }
    return layers[2](at::tanh(y));
  }
  std::vector<Wrap<Block>> layers;
  at::Tensor loss;
};
TORCH_MODULE(Auxiliary);

TEST(InterruptedBackwardTest, AHookMayReachCallsThatAreAhead) {
  for (const bool freezes : {false, true}) {
    const auto make = [freezes](int /*rank*/) {
      Auxiliary model(freezes);
      fill(*model);
      return model;
    };
    expect_same_gradients_as_alone(make, step_once);
  }
}

TEST(InterruptedBackwardTest, AHookInARepeatedCallMayTrainAnotherModel) {
  Block alone = make_filled_block();
  backward_of_all(alone, {1}, 2);
  InterruptedInRepetition alone_outer = make_filled<InterruptedInRepetition>(0);
  backward_of_all(alone_outer, {0}, 2);
  run_local(2, [&](const ProcessGroup& group) {
    for (const Options& way : kWays) {
      FullyShardedDataParallel<InterruptedInRepetition> model(make_filled<InterruptedInRepetition>(0), group, way);
      FullyShardedDataParallel<Block> other(make_filled_block(), group, way);
      model->interruption = [&] {
        const at::AutoGradMode graph(true);
        loss_of(other(batch_of(1, group.rank()))).backward();
        expect_same_grads(unsharded_grads(other), *alone);
      };
      loss_of(model(batch_of(0, group.rank()))).backward();
      EXPECT_FALSE(model->interruption);
      expect_same_grads(unsharded_grads(model), *alone_outer);
    }
  });
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

std::int64_t count_gathered(const ShardedModule& model) {
  std::int64_t gathered = 0;
  for (std::size_t i = 0; i < model.unit_count(); ++i) gathered += model.handle(i).is_gathered() ? 1 : 0;
  return gathered;
}

// Checkpoints a layer as a program may do by itself.
using OwnLayer = std::function<at::Tensor(const at::Tensor& x)>;
struct OwnCheckpoint : torch::autograd::Function<OwnCheckpoint> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const OwnLayer* layer) {
    context->save_for_backward({x});
    context->saved_data["layer"] = reinterpret_cast<std::int64_t>(layer);
    return (*layer)(x);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const auto* const layer = reinterpret_cast<const OwnLayer*>(context->saved_data["layer"].toInt());
    const at::AutoGradMode graph(true);
    const at::Tensor x = context->get_saved_variables()[0].detach().requires_grad_();
    (*layer)(x).backward(gradients[0]);
    return {x.grad(), at::Tensor()};
  }
};

struct CheckpointsItselfImpl : torch::nn::Module {
  CheckpointsItselfImpl() {
    in = register_module("in", torch::nn::Linear(5, 5));
    for (std::size_t i = 0; i < 6; ++i) {
      layers.push_back(register_module("layer" + std::to_string(i), Wrap<Block>(5)));
      calls.push_back([this, i](const at::Tensor& x) {
        if (before_call) before_call();
        return layers[i](x);
      });
    }
    head = register_module("head", torch::nn::Linear(5, 3));
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor y = in(x);
    for (const OwnLayer& call : calls) y = OwnCheckpoint::apply(y, &call);
    return head(y);
  }
  torch::nn::Linear in{nullptr}, head{nullptr};
  std::vector<Wrap<Block>> layers;
  std::vector<OwnLayer> calls;
  std::function<void()> before_call;
};
TORCH_MODULE(CheckpointsItself);

TEST(BackwardMemoryTest, UnitsThatAProgramsOwnFunctionCallsInBackwardAreFreedAfterThat) {
  expect_same_gradients_as_alone(make_filled<CheckpointsItself>, step_once);
  run_local(2, [](const ProcessGroup& group) {
    for (Options way : kWays) {
      if (!is_sharded(way.strategy)) continue;
      way.backward_prefetch = BackwardPrefetch::none;
      FullyShardedDataParallel<CheckpointsItself> model(make_filled<CheckpointsItself>(0), group, way);
      const at::Tensor loss = loss_of(model(batch_of(0, group.rank())));
      std::int64_t highest = 0;
      model->before_call = [&] { highest = std::max(highest, count_gathered(model)); };
      loss.backward();
      EXPECT_EQ(highest, 1);  // the model's own unit
    }
  });
}

// Checkpoints two of its units, the first of which needs no gradient.
struct FrozenFirstImpl : torch::nn::Module {
  FrozenFirstImpl() {
    frozen = register_module("frozen", Wrap<Block>(5));
    trained = register_module("trained", Wrap<Block>(5));
    for (const at::Tensor& param : frozen->parameters()) param.set_requires_grad(false);
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto both = [this](const at::Tensor& input) {
      const at::Tensor y = frozen(input);
      if (between) between();
      return trained(y);
    };
    return activation_checkpoint(both, x);
  }
  Wrap<Block> frozen{nullptr}, trained{nullptr};
  std::function<void()> between;
};
TORCH_MODULE(FrozenFirst);

TEST(BackwardMemoryTest, RepeatedCallsWithoutGradientsAreFreedAtOnce) {
  run_local(2, [](const ProcessGroup& group) {
    Options options;
    options.forward_prefetch = false;
    FullyShardedDataParallel<FrozenFirst> model(make_filled<FrozenFirst>(0), group, options);
    std::vector<std::int64_t> gathered;
    model->between = [&] { gathered.push_back(count_gathered(model)); };
    loss_of(model(batch_of(0, group.rank()))).backward();
    EXPECT_EQ(gathered, (std::vector<std::int64_t>{0, 0}));
  });
}

}  // namespace
}  // namespace tessera::fsdp
