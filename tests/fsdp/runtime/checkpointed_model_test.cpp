// Activation checkpointing of a sharded model, and of modules that a function selects.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/container/sequential.h>

#include <functional>
#include <memory>
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

// Counts the calls of its forward, which backward repeats if they are checkpointed.
struct CountedImpl : torch::nn::Module {
  explicit CountedImpl(std::int64_t width) { block = register_module("block", Wrap<Block>(width)); }
  at::Tensor forward(const at::Tensor& x, const std::string& name = "", std::vector<int> numbers = {}) {
    ++calls;
    return block(x) * (1.0 + static_cast<double>(name.size() + numbers.size()));
  }
  Wrap<Block> block{nullptr};
  int calls = 0;
};
TORCH_MODULE(Counted);

struct CountedModelImpl : torch::nn::Module {
  CountedModelImpl() {
    first = register_module("first", Wrap<Counted>(5));
    second = register_module("second", Wrap<Counted>(5));
    head = register_module("head", torch::nn::Linear(5, 3));
  }
  at::Tensor forward(const at::Tensor& x) {
    return head(second->forward(first(first(x), "ab"), "", std::vector<int>{1, 2, 3}));
  }
  Wrap<Counted> first{nullptr}, second{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(CountedModel);

CountedModel make_counted() {
  CountedModel model;
  fill(*model);
  return model;
}

TEST(ApplyCheckpointingTest, SelectedModulesAreCalledAgainInBackward) {
  CountedModel plain = make_counted(), some = make_counted(), all = make_counted();
  apply_activation_checkpointing(*some, [&](const torch::nn::Module& module) { return &module == some->first.get(); });
  apply_activation_checkpointing(*all);
  backward_of_all(plain, {0}, 1);
  const std::vector<at::Tensor> expected = plain->parameters();
  for (const auto& [model, first, second] : {std::tuple(some, 4, 1), {all, 4, 2}}) {
    CountedModel checkpointed = model;
    backward_of_all(checkpointed, {0}, 1);
    EXPECT_EQ(checkpointed->first->calls, first);
    EXPECT_EQ(checkpointed->second->calls, second);
    const std::vector<at::Tensor> found = checkpointed->parameters();
    for (std::size_t i = 0; i < found.size(); ++i) EXPECT_TRUE(at::allclose(found[i].grad(), expected[i].grad())) << i;
  }
}

TEST(ApplyCheckpointingTest, UnitsOfAShardedModelTrainAsOneProcessDoes) {
  CountedModel alone = make_counted();
  backward_of_all(alone, {0}, 2);
  run_local(2, [&](const ProcessGroup& group) {
    for (const Options& way : kWays) {
      for (const bool is_sharded_first : {false, true}) {
        CountedModel plain = make_counted();
        const auto apply = [&] { apply_activation_checkpointing(*plain, is_any_of<CountedImpl>); };
        if (!is_sharded_first) apply();
        FullyShardedDataParallel<CountedModel> model(plain, group, way);
        if (is_sharded_first) apply();
        for (int times = 0; times < 2; ++times) {
          plain->second->calls = 0;
          model.zero_grad();
          loss_of(model(batch_of(0, group.rank()))).backward();
          EXPECT_EQ(plain->second->calls, 2);
          expect_same_grads(unsharded_grads(model), *alone);
        }
      }
    }
  });
}

TEST(ApplyCheckpointingTest, ACopyIsCheckpointedToo) {
  Wrap<torch::nn::Linear> linear(5, 5);
  apply_activation_checkpointing(*linear);
  const auto copy = std::dynamic_pointer_cast<WrapImpl<torch::nn::LinearImpl>>(linear->clone());
  ASSERT_NE(copy, nullptr);
  EXPECT_TRUE(copy->checkpoints_activations());
}

struct TakesFunctionImpl : torch::nn::Module {
  TakesFunctionImpl() { weight = register_parameter("weight", at::ones({3})); }
  at::Tensor forward(const at::Tensor& x, const std::function<double()>& factor) { return x * weight * factor(); }
  at::Tensor weight;
};
TORCH_MODULE(TakesFunction);

TEST(ApplyCheckpointingTest, WhatCannotBeCheckpointedIsRefused) {
  CountedModel model = make_counted();
  EXPECT_ERROR(apply_activation_checkpointing(*model, [](const torch::nn::Module&) { return true; }),
               ErrorCode::invalid_argument, "module '', a ",
               "is not held in a Wrap, expected a Wrap or a Checkpointed");
  EXPECT_ERROR(apply_activation_checkpointing(*model, is_any_of<CountedImpl, torch::nn::LinearImpl>),
               ErrorCode::invalid_argument, "module 'first.block.up', a torch::nn::LinearImpl, is not held in a Wrap");
  EXPECT_FALSE(model->first->checkpoints_activations());
  Wrap<TakesFunction> takes_function;
  apply_activation_checkpointing(*takes_function);
  EXPECT_ERROR(takes_function->forward(at::ones({3}), [] { return 2.0; }), ErrorCode::unsupported,
               "an argument may share more than tensors with its copy");
}

// Checkpoints two parts of its forward, which call the same units, by their Wrap and by the module's own class.
struct PartsImpl : torch::nn::Module {
  PartsImpl() {
    one = register_module("one", Wrap<Block>(5));
    other = register_module("other", Wrap<Block>(5));
    head = register_module("head", torch::nn::Linear(5, 3));
  }
  at::Tensor forward(at::Tensor x) {
    x = other(one(x));
    x = activation_checkpoint([this](const at::Tensor& y) { return one(other->BlockImpl::forward(one(y))); }, x);
    x = activation_checkpoint([this](const at::Tensor& y) { return other(one->BlockImpl::forward(other(y))); }, x);
    return head(one(x));
  }
  Wrap<Block> one{nullptr}, other{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(Parts);

TEST(CheckpointedModelTest, ACallOfTheEntireShardedModel) {
  SmallModel alone = make_model(), accumulated = make_model();
  backward_of_all(alone, {0, 1}, 2);
  backward_of_all(accumulated, {2, 0, 1}, 2);
  run_local(2, [&](const ProcessGroup& group) {
    for (const Options& way : kWays) {
      FullyShardedDataParallel<SmallModel> model(make_model(), group, way);
      const auto call = [&](int step, bool is_checkpointed = true) {
        const auto plain = [&](const at::Tensor& x) { return model(x); };
        const at::Tensor x = batch_of(step, group.rank());
        return loss_of(is_checkpointed ? activation_checkpoint(plain, x) : plain(x));
      };
      const auto expect_grads = [&](const SmallModel& expected) {
        expect_same_grads(unsharded_grads(model), *expected);
        for (std::size_t i = 0; i < model.unit_count(); ++i) {
          EXPECT_FALSE(model.handle(i).is_gathered() && is_sharded(way.strategy));
        }
      };
      for (const int step : {0, 1}) call(step).backward();
      expect_grads(alone);
      for (const auto& [first, second] : {std::pair(true, true), {true, false}, {false, true}}) {
        for (const bool accumulates : {false, true}) {
          model.zero_grad();
          if (accumulates) call(2, false).backward();
          const at::Tensor one = call(0, first), other = call(1, second);
          (one + other).backward();
          expect_grads(accumulates ? accumulated : alone);
        }
      }
    }
  });
}

// The model is called in a checkpointed part, in another one, and plainly, in one backward.
TEST(CheckpointedModelTest, CallsOfTheModelInCheckpointsOfCheckpoints) {
  SmallModel alone = make_model();
  backward_of_all(alone, {0, 1, 2}, 2);
  run_local(2, [&](const ProcessGroup& group) {
    for (const Options& way : kWays) {
      FullyShardedDataParallel<SmallModel> model(make_model(), group, way);
      const auto plain = [&](const at::Tensor& x) { return model(x); };
      const auto checkpointed = [&](const at::Tensor& x) { return activation_checkpoint(plain, x); };
      for (int times = 0; times < 2; ++times) {
        model.zero_grad();
        const at::Tensor one = loss_of(activation_checkpoint(checkpointed, batch_of(0, group.rank())));
        const at::Tensor two = loss_of(plain(batch_of(1, group.rank())));
        const at::Tensor three = loss_of(activation_checkpoint(checkpointed, batch_of(2, group.rank())));
        (one + two + three).backward();
        expect_same_grads(unsharded_grads(model), *alone);
      }
    }
  });
}

// Units that are called again in the repetition of a part of forward.
TEST(CheckpointedModelTest, APartOfForwardWithSeveralUnitsIsCheckpointed) {
  const auto make = [] {
    Parts model;
    fill(*model);
    return model;
  };
  for (const int ranks : {1, 2}) {
    Parts alone = make();
    backward_of_all(alone, {0}, ranks);
    run_local(ranks, [&](const ProcessGroup& group) {
      for (const Options& way : kWays) {
        FullyShardedDataParallel<Parts> model(make(), group, way);
        for (int times = 0; times < 2; ++times) {
          model.zero_grad();
          loss_of(model(batch_of(0, group.rank()))).backward();
          expect_same_grads(unsharded_grads(model), *alone);
        }
      }
    });
  }
}

struct TwoBlocksImpl : torch::nn::Module {
  explicit TwoBlocksImpl(torch::nn::Sequential layers_in) { layers = register_module("layers", std::move(layers_in)); }
  at::Tensor forward(const at::Tensor& x) { return layers->forward(x); }
  torch::nn::Sequential layers;
};
TORCH_MODULE(TwoBlocks);

TEST(CheckpointedModelTest, StatesOfCheckpointedAndPlainModulesLoadIntoEachOther) {
  run_local(2, [](const ProcessGroup& group) {
    const auto checkpointed = [] {
      return TwoBlocks(torch::nn::Sequential(Wrap<Checkpointed<Block>>(5), Checkpointed<Block>(5)));
    };
    const auto plain = [] { return TwoBlocks(torch::nn::Sequential(Wrap<Block>(5), Block(5))); };
    for (const bool to_plain : {false, true}) {
      TwoBlocks source = to_plain ? checkpointed() : plain(), target = to_plain ? plain() : checkpointed();
      fill(*source);
      target->to(at::kDouble);
      FullyShardedDataParallel<TwoBlocks> from(source, group), to(target, group);
      to.load_state_dict(from.state_dict(StateDictType::full, {.rank0_only = false}));
      const at::NoGradGuard no_grad;
      EXPECT_TRUE(at::equal(to(batch_of(0, 0)), from(batch_of(0, 0))));
    }
  });
}

// Checkpointed calls use a layer three times and another one for each of some chunks, and all layers are in one unit.
struct SharedLayersImpl : torch::nn::Module {
  explicit SharedLayersImpl(int chunks_in) : chunks(chunks_in) {
    in = register_module("in", torch::nn::Linear(5, 5));
    shared = register_module("shared", torch::nn::Linear(5, 5));
    head = register_module("head", torch::nn::Linear(5, 3));
  }
  at::Tensor forward(at::Tensor x) {
    x = in(x);
    for (int i = 0; i < 3; ++i) {
      x = activation_checkpoint([this](const at::Tensor& y) { return at::tanh(shared(y)); }, x);
    }
    std::vector<at::Tensor> results;
    for (const at::Tensor& chunk : x.chunk(chunks)) {
      results.push_back(activation_checkpoint([this](const at::Tensor& y) { return head(y); }, chunk));
    }
    return at::cat(results);
  }
  torch::nn::Linear in{nullptr}, shared{nullptr}, head{nullptr};
  int chunks;
};
TORCH_MODULE(SharedLayers);

// A layer that uses one of its two weights, and one of the unit that contains it.
struct BiasedImpl : torch::nn::Module {
  explicit BiasedImpl(at::Tensor bias_in) : bias(std::move(bias_in)) {
    used = register_module("used", torch::nn::Linear(5, 5));
    unused = register_module("unused", torch::nn::Linear(5, 5));
  }
  at::Tensor forward(const at::Tensor& x) { return at::tanh(used(x) + bias); }
  at::Tensor bias;  // no parameter of this module
  torch::nn::Linear used{nullptr}, unused{nullptr};
};
TORCH_MODULE(Biased);

template <typename Layer>
struct SharedBiasImpl : torch::nn::Module {
  SharedBiasImpl() {
    bias = register_parameter("bias", at::ones({5}));
    in = register_module("in", torch::nn::Linear(5, 5));
    layer = register_module("layer", Layer(bias));
    other = register_module("other", Layer(bias));
  }
  at::Tensor forward(const at::Tensor& x) {
    return layer->forward(other->forward(layer->forward(layer->forward(other->forward(in(x))))));
  }
  at::Tensor bias;
  torch::nn::Linear in{nullptr};
  Layer layer{nullptr}, other{nullptr};
};

// Compares the gradients of sharded models, on 1 and 2 ranks, with those of one process.
template <typename Make>
void expect_gradients_of_one_process(const Make& make) {
  for (const int ranks : {1, 2}) {
    auto alone = make();
    backward_of_all(alone, {0}, ranks);
    zero_missing_grads(*alone);
    run_local(ranks, [&](const ProcessGroup& group) {
      for (const Options& way : kWays) {
        FullyShardedDataParallel<decltype(make())> model(make(), group, way);
        for (int times = 0; times < 2; ++times) {
          model.zero_grad();
          loss_of(model(batch_of(0, group.rank()))).backward();
          for (std::size_t i = 0; i < model.unit_count(); ++i) {
            EXPECT_FALSE(model.handle(i).is_gathered() && is_sharded(way.strategy));
          }
          expect_same_grads(unsharded_grads(model), *alone);
        }
      }
    });
  }
}

TEST(CheckpointedModelTest, SeveralCheckpointedCallsUseParametersOfTheModelsOwnUnit) {
  for (int chunks = 1; chunks <= 4; ++chunks) {
    expect_gradients_of_one_process([&] {
      SharedLayers model(chunks);
      fill(*model);
      return model;
    });
  }
}

TEST(CheckpointedModelTest, CheckpointedUnitsThatAreCalledAgainUseSomeParametersAndOneOfTheModel) {
  const auto make = [](auto layer) {
    return [] {
      auto model = std::make_shared<SharedBiasImpl<decltype(layer)>>();
      fill(*model);
      return torch::nn::ModuleHolder<SharedBiasImpl<decltype(layer)>>(model);
    };
  };
  expect_gradients_of_one_process(make(Wrap<Checkpointed<Biased>>(nullptr)));
  expect_gradients_of_one_process(make(Checkpointed<Wrap<Biased>>(nullptr)));
}

}  // namespace
}  // namespace tessera::fsdp
