// Units whose forward is not called through a Wrap: by their own class, by functions that take their parameters, in
// checkpointed parts, and in modules of LibTorch.

#include <ATen/record_function.h>
#include <gtest/gtest.h>
#include <torch/nn/functional/linear.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/transformercoder.h>
#include <torch/nn/modules/transformerlayer.h>
#include <torch/optim/adamw.h>

#include <functional>
#include <memory>

#include "fsdp/cases.h"
#include "fsdp/small_model.h"
#include "support/chaos.h"
#include "support/error_matchers.h"
#include "tessera/comm/local_ranks.h"
#include "tessera/fsdp/activation_checkpoint.h"

namespace tessera::fsdp {
namespace {

// Multiplies by a weight that only its context sees in backward.
struct Multiplied : torch::autograd::Function<Multiplied> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const at::Tensor& weight) {
    context->save_for_backward({x, weight});
    return at::matmul(x, weight.t()).add(0);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const torch::autograd::variable_list saved = context->get_saved_variables();
    return {at::matmul(gradients[0], saved[1]), at::matmul(gradients[0].t(), saved[0])};
  }
};

enum class CallWay : std::uint8_t {
  by_class,
  by_holder,
  plain,
  checkpointed,
  by_function,
  custom_function,
  one_op,
  views
};
constexpr CallWay kAllWays[] = {CallWay::by_class,    CallWay::by_holder,       CallWay::plain,  CallWay::checkpointed,
                                CallWay::by_function, CallWay::custom_function, CallWay::one_op, CallWay::views};
constexpr const char* kNames[] = {"ByClass",    "ByHolder",       "Plain", "Checkpointed",
                                  "ByFunction", "CustomFunction", "OneOp", "Views"};

// Three blocks, the first of which is called twice, between linear layers that share a weight with nothing.
struct StackImpl : torch::nn::Module {
  explicit StackImpl(CallWay way_in) : way(way_in) {
    for (int i = 0; i < 3; ++i) {
      if (way == CallWay::plain || way == CallWay::checkpointed) {
        layers->push_back(Block(5));
      } else {
        layers->push_back(Wrap<Block>(5));
      }
    }
    register_module("layers", layers);
    head = register_module("head", Wrap<torch::nn::Linear>(5, 5));
  }

  at::Tensor call(std::size_t i, const at::Tensor& x) {
    const at::Tensor result = call_layer(layers[i], x);
    if (after_call) after_call();
    return result;
  }

  at::Tensor call_layer(const std::shared_ptr<torch::nn::Module>& layer, const at::Tensor& x) const {
    switch (way) {
      case CallWay::by_class:
      case CallWay::plain:
        return layer->as<BlockImpl>()->forward(x);
      case CallWay::by_holder: {
        RECORD_FUNCTION("Block::forward", std::vector<c10::IValue>{x});
        return layer->as<Block>()->forward(x);
      }
      case CallWay::checkpointed:
        return activation_checkpoint(
            [layer](const at::Tensor& input) { return layer->as<BlockImpl>()->forward(input); }, x);
      default:
        return layer->as<WrapImpl<BlockImpl>>()->forward(x);
    }
  }

  at::Tensor forward(at::Tensor x) {
    x = call(1, call(0, x));
    x = call(2, call(0, x)) + x;
    switch (way) {
      case CallWay::by_function:
        x = torch::nn::functional::linear(at::tanh(x), head->weight, head->bias) * head->weight.sum();
        break;
      case CallWay::custom_function:
        x = Multiplied::apply(at::tanh(x), head->weight);
        break;
      case CallWay::one_op:
        x = at::cat({x, head->weight, layers[1]->as<BlockImpl>()->down->weight.narrow(1, 0, 5)}).tanh();
        break;
      case CallWay::views: {
        const at::Tensor view = head->weight.t();
        x = call(1, x * view.diagonal());
        x = at::matmul(x, view);
        break;
      }
      default:
        break;
    }
    return head(x);
  }

  CallWay way;
  std::function<void()> after_call;
  torch::nn::ModuleList layers;
  Wrap<torch::nn::Linear> head{nullptr};
};
TORCH_MODULE(Stack);

Stack make_stack(CallWay way) {
  Stack model(way);
  fill(*model);
  return model;
}

using ImplicitCase = std::tuple<CallWay, Case>;

class ImplicitCallsTest : public ::testing::TestWithParam<ImplicitCase> {
 protected:
  CallWay way() const { return std::get<0>(GetParam()); }
  int world() const { return std::get<0>(std::get<1>(GetParam())); }
  Options options() const {
    const auto [ranks, use_orig_params, strategy] = std::get<1>(GetParam());
    Options options;
    options.use_orig_params = use_orig_params;
    options.strategy = strategy;
    if (way() == CallWay::plain || way() == CallWay::checkpointed) {
      options.policy = wrap_modules<BlockImpl, torch::nn::LinearImpl>();
    }
    return options;
  }
};

std::string name_of_implicit_case(const ::testing::TestParamInfo<ImplicitCase>& test) {
  const auto& [way, rest] = test.param;
  return kNames[static_cast<std::size_t>(way)] + name_of_case({rest, test.index});
}

INSTANTIATE_TEST_SUITE_P(Ways, ImplicitCallsTest,
                         ::testing::Combine(::testing::ValuesIn(kAllWays),
                                            ::testing::Combine(::testing::Values(1, 3), ::testing::Bool(),
                                                               ::testing::Values(ShardingStrategy::full_shard,
                                                                                 ShardingStrategy::shard_grad_op,
                                                                                 ShardingStrategy::no_shard))),
                         name_of_implicit_case);

TEST_P(ImplicitCallsTest, TrainAsOneProcessDoes) {
  constexpr int kSteps = 4 / static_cast<int>(::tessera::testing::stride_if_sanitized(2));
  Stack alone = make_stack(way());
  torch::optim::AdamW alone_optimizer(unique_params(*alone), torch::optim::AdamWOptions(0.02));
  std::vector<std::vector<double>> losses;
  for (int step = 0; step < kSteps; ++step) {
    losses.push_back(backward_of_all(alone, {step}, world()));
    alone_optimizer.step();
  }
  run_local(world(), [&](const ProcessGroup& group) {
    FullyShardedDataParallel<Stack> model(make_stack(way()), group, options());
    torch::optim::AdamW optimizer(model.parameters(), torch::optim::AdamWOptions(0.02));
    for (int step = 0; step < kSteps; ++step) {
      optimizer.zero_grad();
      const at::Tensor loss = loss_of(model(batch_of(step, group.rank())));
      EXPECT_NEAR(loss.item<double>(), losses[static_cast<std::size_t>(step)][static_cast<std::size_t>(group.rank())],
                  1e-12);
      loss.backward();
      optimizer.step();
      for (std::size_t i = 0; i < model.unit_count(); ++i) {
        EXPECT_FALSE(model.handle(i).is_gathered() && options().strategy != ShardingStrategy::no_shard)
            << model.unit_name(i);
      }
    }
    const std::vector<at::Tensor> found = full_params(model), expected = alone->parameters();
    ASSERT_EQ(found.size(), expected.size());
    for (std::size_t i = 0; i < found.size(); ++i) {
      EXPECT_TRUE(at::allclose(found[i], expected[i], 1e-11, 1e-11)) << i;
    }
    const at::NoGradGuard no_grad;
    EXPECT_TRUE(at::allclose(model(batch_of(9, 0)), alone->forward(batch_of(9, 0)), 1e-11, 1e-11));
  });
}

// --- what LibTorch calls itself

struct EncoderImpl : torch::nn::Module {
  EncoderImpl() {
    const auto layer = torch::nn::TransformerEncoderLayerOptions(8, 2).dim_feedforward(12).dropout(0);
    in = register_module("in", torch::nn::Linear(5, 8));
    encoder = register_module("encoder", torch::nn::TransformerEncoder(torch::nn::TransformerEncoderOptions(layer, 2)));
    out = register_module("out", torch::nn::Linear(8, 3));
  }
  at::Tensor forward(const at::Tensor& x) { return out(encoder(in(x).unsqueeze(1))).squeeze(1); }
  torch::nn::Linear in{nullptr}, out{nullptr};
  torch::nn::TransformerEncoder encoder{nullptr};
};
TORCH_MODULE(Encoder);

TEST(UnitsWithoutWrapTest, LayersOfAModelThatCannotBeChanged) {
  const auto make = [] {
    Encoder model;
    fill(*model);
    return model;
  };
  for (const int world : {1, 2, 3}) {
    Encoder alone = make();
    torch::optim::AdamW alone_optimizer(unique_params(*alone), torch::optim::AdamWOptions(0.01));
    std::vector<std::vector<double>> losses;
    for (int step = 0; step < 4; ++step) {
      losses.push_back(backward_of_all(alone, {step}, world));
      alone_optimizer.step();
    }
    run_local(world, [&](const ProcessGroup& group) {
      Options options;
      options.policy = wrap_modules<torch::nn::TransformerEncoderLayerImpl>();
      FullyShardedDataParallel<Encoder> model(make(), group, options);
      ASSERT_EQ(model.unit_count(), 3);
      EXPECT_EQ(model.unit_name(1), "encoder.layers.0");
      torch::optim::AdamW optimizer(model.parameters(), torch::optim::AdamWOptions(0.01));
      for (int step = 0; step < 4; ++step) {
        optimizer.zero_grad();
        const at::Tensor loss = loss_of(model(batch_of(step, group.rank())));
        EXPECT_NEAR(loss.item<double>(), losses[static_cast<std::size_t>(step)][static_cast<std::size_t>(group.rank())],
                    1e-10);
        loss.backward();
        optimizer.step();
      }
      const std::vector<at::Tensor> found = full_params(model), expected = alone->parameters();
      for (std::size_t i = 0; i < found.size(); ++i) {
        EXPECT_TRUE(at::allclose(found[i], expected[i], 1e-8, 1e-8)) << i;
      }
    });
  }
}

TEST(UnitsWithoutWrapTest, AUnitIsUnshardedOnlyWhileItComputes) {
  run_local(2, [&](const ProcessGroup& group) {
    Options options;
    options.forward_prefetch = false;
    FullyShardedDataParallel<Stack> model(make_stack(CallWay::by_class), group, options);
    int calls = 0;
    model->after_call = [&] {
      ++calls;
      int gathered = 0;
      for (std::size_t i = 0; i < model.unit_count(); ++i) gathered += model.handle(i).is_gathered() ? 1 : 0;
      EXPECT_EQ(gathered, 1) << calls;
    };
    const at::NoGradGuard no_grad;
    model(batch_of(0, 0));
    EXPECT_EQ(calls, 4);
    for (std::size_t i = 0; i < model.unit_count(); ++i) EXPECT_FALSE(model.handle(i).is_gathered()) << i;
  });
}

// --- refusals

TEST(UnitsWithoutWrapTest, AGradientFromOutsideOfForwardIsRefused) {
  run_local(2, [&](const ProcessGroup& group) {
    FullyShardedDataParallel<Stack> model(make_stack(CallWay::by_class), group);
    const at::Tensor& bias = model->layers[0]->as<BlockImpl>()->up->bias;
    EXPECT_ERROR(bias.pow(2).sum().backward(), ErrorCode::invalid_argument,
                 "backward: a gradient reached parameter 'layers.0.up.bias' of unit 'layers.0' outside of any call");
    EXPECT_FALSE(bias.grad().defined());
    for (const bool is_first : {true, false}) {
      const at::Tensor loss = loss_of(model(batch_of(0, 0))), stray = bias.pow(2).sum();
      EXPECT_ERROR((is_first ? stray + loss : loss + stray).backward(), ErrorCode::invalid_argument,
                   "parameter 'layers.0.up.bias' of unit 'layers.0' outside of any call");
      EXPECT_FALSE(bias.grad().defined());
    }
    loss_of(model(batch_of(0, 0))).backward();
    EXPECT_TRUE(model.handle(0).sharded_gradient().defined());
  });
}

TEST(UnitsWithoutWrapTest, InputsThatCannotBeCastAreRefused) {
  run_local(2, [&](const ProcessGroup& group) {
    Options options;
    options.mixed_precision.param_dtype = at::kBFloat16;
    options.mixed_precision.cast_forward_inputs = true;
    FullyShardedDataParallel<Stack> model(make_stack(CallWay::by_class), group, options);
    EXPECT_ERROR(model(batch_of(0, 0)), ErrorCode::unsupported,
                 "forward: 'layers.0' is used without a call through its Wrap");
    for (std::size_t i = 0; i < model.unit_count(); ++i) EXPECT_FALSE(model.handle(i).is_gathered()) << i;
  });
}

}  // namespace
}  // namespace tessera::fsdp
