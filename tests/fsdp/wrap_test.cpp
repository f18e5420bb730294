// Modules that users hold in a Wrap: those of LibTorch, and functions named forward of every kind.

#include "tessera/fsdp/wrap.h"

#include <gtest/gtest.h>
#include <torch/nn/functional/instancenorm.h>
#include <torch/nn/modules.h>
#include <torch/nn/modules/container/any.h>
#include <torch/serialize.h>

#include <functional>
#include <sstream>
#include <string>
#include <utility>

#include "fsdp/small_model.h"
#include "support/error_matchers.h"
#include "tessera/comm/local_ranks.h"

namespace tessera::fsdp {
namespace {

namespace nn = torch::nn;

at::Tensor numbers(at::IntArrayRef shape) {
  std::int64_t numel = 1;
  for (const std::int64_t size : shape) numel *= size;
  return at::arange(numel, at::kDouble).mul(0.37).sin().reshape(shape);
}

template <typename T>
std::vector<at::Tensor> tensors_of(T value) {
  std::vector<at::Tensor> tensors;
  for_each_tensor(value, [&](at::Tensor& tensor) { tensors.push_back(tensor.detach().clone()); });
  return tensors;
}

// Expects that a module returns the same and has the same gradients when it is sharded over two ranks.
template <typename Module, typename Make, typename... Inputs>
void expect_same_when_sharded(const char* name, const Make& make, const Inputs&... inputs) {
  const auto filled = [&] {
    Wrap<Module> module = make();
    fill(*module);
    module->train();
    return module;
  };
  const auto run = [&](auto& module) {
    auto result = module(inputs...);
    at::Tensor loss;
    for_each_tensor(result, [&](at::Tensor& tensor) {
      if (tensor.requires_grad()) loss = loss.defined() ? loss + tensor.square().sum() : tensor.square().sum();
    });
    loss.backward();
    return tensors_of(result);
  };
  Wrap<Module> alone = filled();
  const std::vector<at::Tensor> expected = run(alone);
  run_local(2, [&](const ProcessGroup& group) {
    FullyShardedDataParallel<Wrap<Module>> model(filled(), group);
    const std::vector<at::Tensor> found = run(model);
    ASSERT_EQ(found.size(), expected.size()) << name;
    for (std::size_t i = 0; i < found.size(); ++i) {
      EXPECT_TRUE(at::allclose(found[i], expected[i], 1e-9, 1e-9)) << name << ": result " << i;
    }
    SummonOptions with_grads;
    with_grads.with_grads = true;
    model.summon_full_params(
        [&] {
          const std::vector<at::Tensor> params = unique_params(*model.module_ptr()), others = unique_params(*alone);
          ASSERT_EQ(params.size(), others.size()) << name;
          for (std::size_t i = 0; i < params.size(); ++i) {
            ASSERT_EQ(params[i].grad().defined(), others[i].grad().defined()) << name << ": parameter " << i;
            if (!params[i].grad().defined()) continue;
            EXPECT_TRUE(at::allclose(params[i].grad(), others[i].grad(), 1e-9, 1e-9)) << name << ": parameter " << i;
          }
        },
        with_grads);
  });
}

#define EXPECT_SAME_WHEN_SHARDED(Module, make, ...) \
  expect_same_when_sharded<Module>(                 \
      #Module, [] { return Wrap<Module> make; }, __VA_ARGS__)

TEST(WrapTest, LinearAndConvolutionalModules) {
  EXPECT_SAME_WHEN_SHARDED(nn::Linear, (3, 4), numbers({2, 3}));
  EXPECT_SAME_WHEN_SHARDED(nn::Bilinear, (3, 4, 5), numbers({2, 3}), numbers({2, 4}));
  EXPECT_SAME_WHEN_SHARDED(nn::Conv1d, (nn::Conv1dOptions(3, 4, 2)), numbers({2, 3, 5}));
  EXPECT_SAME_WHEN_SHARDED(nn::Conv2d, (nn::Conv2dOptions(3, 4, 2)), numbers({2, 3, 4, 4}));
  EXPECT_SAME_WHEN_SHARDED(nn::Conv3d, (nn::Conv3dOptions(3, 4, 2)), numbers({2, 3, 3, 3, 3}));
  EXPECT_SAME_WHEN_SHARDED(nn::ConvTranspose1d, (nn::ConvTranspose1dOptions(3, 4, 2)), numbers({2, 3, 5}));
  EXPECT_SAME_WHEN_SHARDED(nn::ConvTranspose2d, (nn::ConvTranspose2dOptions(3, 4, 2)), numbers({2, 3, 4, 4}));
  EXPECT_SAME_WHEN_SHARDED(nn::ConvTranspose3d, (nn::ConvTranspose3dOptions(3, 4, 2)), numbers({2, 3, 3, 3, 3}));
  EXPECT_SAME_WHEN_SHARDED(nn::PReLU, (), numbers({2, 3}));
}

TEST(WrapTest, Normalizations) {
  EXPECT_SAME_WHEN_SHARDED(nn::BatchNorm1d, (3), numbers({4, 3}));
  EXPECT_SAME_WHEN_SHARDED(nn::BatchNorm2d, (3), numbers({2, 3, 4, 4}));
  EXPECT_SAME_WHEN_SHARDED(nn::BatchNorm3d, (3), numbers({2, 3, 2, 2, 2}));
  EXPECT_SAME_WHEN_SHARDED(nn::InstanceNorm1d, (nn::InstanceNorm1dOptions(3).affine(true)), numbers({2, 3, 5}));
  EXPECT_SAME_WHEN_SHARDED(nn::InstanceNorm2d, (nn::InstanceNorm2dOptions(3).affine(true)), numbers({2, 3, 4, 4}));
  EXPECT_SAME_WHEN_SHARDED(nn::InstanceNorm3d, (nn::InstanceNorm3dOptions(3).affine(true)), numbers({2, 3, 2, 2, 2}));
  EXPECT_SAME_WHEN_SHARDED(nn::LayerNorm, (nn::LayerNormOptions({3})), numbers({2, 3}));
  EXPECT_SAME_WHEN_SHARDED(nn::GroupNorm, (nn::GroupNormOptions(2, 4)), numbers({2, 4, 3}));
  std::ostringstream wrapped, plain;
  wrapped << *Wrap<nn::BatchNorm2d>(3) << *Wrap<nn::InstanceNorm1d>(3);
  plain << *nn::BatchNorm2d(3) << *nn::InstanceNorm1d(3);
  EXPECT_EQ(wrapped.str(), plain.str());
}

TEST(WrapTest, RecurrentModulesAndEmbeddings) {
  EXPECT_SAME_WHEN_SHARDED(nn::RNN, (3, 4), numbers({5, 2, 3}));
  EXPECT_SAME_WHEN_SHARDED(nn::LSTM, (nn::LSTMOptions(3, 4).num_layers(2).bidirectional(true)), numbers({5, 2, 3}));
  EXPECT_SAME_WHEN_SHARDED(nn::GRU, (3, 4), numbers({5, 2, 3}));
  EXPECT_SAME_WHEN_SHARDED(nn::RNNCell, (3, 4), numbers({2, 3}));
  EXPECT_SAME_WHEN_SHARDED(nn::LSTMCell, (3, 4), numbers({2, 3}));
  EXPECT_SAME_WHEN_SHARDED(nn::GRUCell, (3, 4), numbers({2, 3}));
  EXPECT_SAME_WHEN_SHARDED(nn::Embedding, (5, 3), at::arange(4, at::kLong));
  EXPECT_SAME_WHEN_SHARDED(nn::EmbeddingBag, (5, 3), at::arange(4, at::kLong).reshape({2, 2}));
}

TEST(WrapTest, Transformers) {
  const auto encoder = [] { return nn::TransformerEncoderLayerOptions(4, 2).dim_feedforward(6).dropout(0); };
  const auto decoder = [] { return nn::TransformerDecoderLayerOptions(4, 2).dim_feedforward(6).dropout(0); };
  const at::Tensor x = numbers({3, 2, 4}), memory = numbers({5, 2, 4});
  expect_same_when_sharded<nn::MultiheadAttention>(
      "MultiheadAttention", [] { return Wrap<nn::MultiheadAttention>(nn::MultiheadAttentionOptions(4, 2)); }, x, x, x);
  expect_same_when_sharded<nn::TransformerEncoderLayer>(
      "TransformerEncoderLayer", [&] { return Wrap<nn::TransformerEncoderLayer>(encoder()); }, x);
  expect_same_when_sharded<nn::TransformerDecoderLayer>(
      "TransformerDecoderLayer", [&] { return Wrap<nn::TransformerDecoderLayer>(decoder()); }, x, memory);
  expect_same_when_sharded<nn::TransformerEncoder>(
      "TransformerEncoder", [&] { return Wrap<nn::TransformerEncoder>(nn::TransformerEncoderOptions(encoder(), 2)); },
      x);
  expect_same_when_sharded<nn::TransformerDecoder>(
      "TransformerDecoder", [&] { return Wrap<nn::TransformerDecoder>(nn::TransformerDecoderOptions(decoder(), 2)); },
      x, memory);
  expect_same_when_sharded<nn::Transformer>(
      "Transformer",
      [] {
        return Wrap<nn::Transformer>(
            nn::TransformerOptions(4, 2).num_encoder_layers(1).num_decoder_layers(1).dim_feedforward(6).dropout(0));
      },
      memory, x);
}

// --- kinds of forward

struct Scaled : torch::nn::Module {
  Scaled() { scale = register_parameter("scale", at::ones({3}, at::kDouble)); }
  at::Tensor scale;
};
struct Shape {
  virtual ~Shape() = default;
  virtual double area() const = 0;
};
struct Square : Shape {
  double area() const override { return 4; }
};

struct NoexceptImpl : Scaled {
  at::Tensor forward(const at::Tensor& x) noexcept { return x * scale; }
};
struct ConstNoexceptImpl : Scaled {
  at::Tensor forward(const at::Tensor& x) const noexcept { return x * scale; }
};
struct WithDefaultsImpl : Scaled {
  at::Tensor forward(const at::Tensor& x, double by = 2, const std::string& suffix = "") {
    return x * scale * by + static_cast<double>(suffix.size());
  }
};
struct OverloadedImpl : Scaled {
  at::Tensor forward(const at::Tensor& x) { return x * scale; }
  at::Tensor forward(const at::Tensor& x, const at::Tensor& y) { return x * y * scale; }
};
struct TemplateImpl : Scaled {
  template <typename Number>
  at::Tensor forward(const at::Tensor& x, Number by) {
    return x * scale * static_cast<double>(by);
  }
};
struct AbstractArgumentImpl : Scaled {
  at::Tensor forward(const at::Tensor& x, const Shape& shape) { return x * scale * shape.area(); }
};
struct MutableArgumentImpl : Scaled {
  at::Tensor forward(at::Tensor& x, std::vector<int>& calls) {
    calls.push_back(1);
    return x * scale;
  }
};
struct ConstResultImpl : Scaled {
  const at::Tensor& forward(const at::Tensor& x) {
    kept = x * scale;
    return kept;
  }
  at::Tensor kept;
};
TORCH_MODULE(Noexcept);
TORCH_MODULE(ConstNoexcept);
TORCH_MODULE(WithDefaults);
TORCH_MODULE(Overloaded);
TORCH_MODULE(Template);
TORCH_MODULE(AbstractArgument);
TORCH_MODULE(MutableArgument);
TORCH_MODULE(ConstResult);

// Expects the results of a call of a unit, with and without Wrap, and a gradient.
template <typename Module, typename Call>
void expect_result(const Call& call, double expected) {
  run_local(2, [&](const ProcessGroup& group) {
    Options options;
    options.strategy = ShardingStrategy::full_shard;
    const auto check = [&](auto& model) {
      const at::Tensor result = call(model);
      EXPECT_EQ(result.sum().template item<double>(), expected);
      result.sum().backward();
      EXPECT_TRUE(model.handle(0).sharded_gradient().defined());
    };
    FullyShardedDataParallel<Wrap<Module>> wrapped(Wrap<Module>(), group, options);
    check(wrapped);
    FullyShardedDataParallel<Module> plain(Module(), group, options);
    check(plain);
    Wrap<Module> alone;
    EXPECT_EQ(call(alone).sum().template item<double>(), expected);
  });
}

TEST(WrapTest, KindsOfForward) {
  const at::Tensor x = at::ones({3}, at::kDouble);
  expect_result<Noexcept>([&](auto& model) { return model(x); }, 3);
  expect_result<ConstNoexcept>([&](auto& model) { return model(x); }, 3);
  expect_result<WithDefaults>([&](auto& model) { return model(x); }, 6);
  expect_result<WithDefaults>([&](auto& model) { return model(x, 3, "four"); }, 21);
  expect_result<Overloaded>([&](auto& model) { return model(x); }, 3);
  expect_result<Overloaded>([&](auto& model) { return model(x, x * 2); }, 6);
  expect_result<Template>([&](auto& model) { return model(x, 5); }, 15);
  expect_result<AbstractArgument>([&](auto& model) { return model(x, Square()); }, 12);
  expect_result<ConstResult>([&](auto& model) -> at::Tensor { return model(x); }, 3);
  std::vector<int> calls;
  expect_result<MutableArgument>(
      [&](auto& model) {
        at::Tensor input = x;
        std::vector<int> own;
        const at::Tensor result = model(input, own);
        EXPECT_EQ(own.size(), 1);
        return result;
      },
      3);
  EXPECT_EQ(Wrap<WithDefaults>()->forward(x, 3, "four").sum().item<double>(), 21);
}

TEST(WrapTest, ASequentialOfModulesAndInAnyModule) {
  const auto make = [] {
    Wrap<nn::Sequential> module(nn::Linear(3, 4), nn::Tanh(), Wrap<nn::Linear>(4, 2));
    fill(*module);
    return module;
  };
  const at::Tensor x = numbers({2, 3});
  const at::Tensor expected = make()(x).detach();
  run_local(2, [&](const ProcessGroup& group) {
    FullyShardedDataParallel<Wrap<nn::Sequential>> model(make(), group);
    EXPECT_EQ(model.unit_count(), 2);
    EXPECT_TRUE(at::allclose(model(x), expected));
  });
  nn::AnyModule any(Wrap<nn::Linear>(3, 4)), with_defaults(Wrap<nn::MultiheadAttention>(4, 2));
  EXPECT_EQ(any.forward(at::ones({1, 3})).sizes(), at::IntArrayRef({1, 4}));
}

// --- holders

TEST(WrapTest, OfAHolderThatExistsAndInAMemberOfThePlainType) {
  Block block(3);
  Wrap<Block> shared(block), moved{Block(3)};
  EXPECT_TRUE(shared->up->weight.is_same(block->up->weight));
  EXPECT_EQ(moved->parameters().size(), 4);
  const auto make = [] { return Wrap<Block>(3); };
  std::vector<Wrap<Block>> blocks{make(), nullptr};
  blocks[1] = std::move(blocks[0]);
  EXPECT_EQ(blocks[1]->parameters().size(), 4);
  Block plain = shared;
  plain = moved;
  fill(*moved);
  const at::Tensor x = numbers({2, 3});
  EXPECT_TRUE(at::equal(plain(x), moved(x)));
  struct ModelImpl : torch::nn::Module {
    ModelImpl() {
      block = Wrap<Block>(3);
      register_module("block", block);
    }
    at::Tensor forward(const at::Tensor& input) { return block(input); }
    Block block{nullptr};
  };
  run_local(2, [&](const ProcessGroup& group) {
    auto model = std::make_shared<ModelImpl>();
    fill(*model);
    const at::Tensor expected = model->forward(x);
    FullyShardedDataParallel<ModelImpl> sharded(model, group);
    EXPECT_EQ(sharded.unit_name(0), "block");
    EXPECT_TRUE(at::allclose(sharded(x), expected));
  });
}

TEST(WrapTest, ACloneIsWrappedToo) {
  const auto wrapped = std::dynamic_pointer_cast<WrapImpl<nn::LinearImpl>>(Wrap<nn::Linear>(3, 4)->clone());
  ASSERT_NE(wrapped, nullptr);
  EXPECT_EQ(wrapped->unit(), nullptr);
  nn::Sequential sequential(Wrap<nn::Linear>(3, 4), nn::Tanh(), Wrap<nn::BatchNorm1d>(4));
  const auto copy = std::dynamic_pointer_cast<nn::SequentialImpl>(sequential->clone());
  ASSERT_NE(copy, nullptr);
  const at::Tensor x = at::ones({2, 3});
  EXPECT_TRUE(at::equal(copy->forward(x), sequential->forward(x)));
  const at::NoGradGuard no_grad;
  copy->parameters()[0].zero_();
  EXPECT_NE(sequential->parameters()[0].abs().sum().item<float>(), 0);
}

// --- refusals

TEST(WrapTest, AShardedModuleIsNotSavedCopiedOrConverted) {
  run_local(2, [](const ProcessGroup& group) {
    SmallModel plain = make_model();
    FullyShardedDataParallel<SmallModel> model(plain, group);
    std::ostringstream out;
    EXPECT_ERROR(torch::save(plain, out), ErrorCode::invalid_argument, "torch::save: module 'first' is sharded",
                 "summon_full_params");
    EXPECT_ERROR(plain->first->clone(), ErrorCode::invalid_argument, "clone: module 'first' is sharded");
    EXPECT_ERROR(plain->to(at::kFloat), ErrorCode::invalid_argument, "to: module 'first' is sharded");
    model.summon_full_params([&] { torch::save(plain->first, out); });
    loss_of(model(batch_of(0, 0))).backward();
    nn::Sequential sequential(nn::Tanh(), Wrap<nn::Linear>(5, 5));
    FullyShardedDataParallel<nn::Sequential> of_sequential(sequential, group);
    EXPECT_ERROR(sequential->clone(), ErrorCode::invalid_argument, "clone: module '1' is sharded");
    EXPECT_ERROR(torch::save(sequential, out), ErrorCode::invalid_argument, "torch::save: module '1' is sharded");
    of_sequential.summon_full_params([&] {
      const auto copy = std::dynamic_pointer_cast<nn::SequentialImpl>(sequential->clone());
      EXPECT_EQ(copy->parameters()[0].sizes(), at::IntArrayRef({5, 5}));
    });
  });
}

TEST(WrapTest, ParametersThatWereConvertedAreRefused) {
  run_local(2, [](const ProcessGroup& group) {
    FullyShardedDataParallel<nn::Linear> model(nn::Linear(3, 4), group);
    model->to(at::kHalf);
    EXPECT_ERROR(model(at::ones({2, 3})), ErrorCode::invalid_argument,
                 "sharded parameter 'weight' was converted to Half on cpu, expected Float on cpu");
  });
}

}  // namespace
}  // namespace tessera::fsdp
