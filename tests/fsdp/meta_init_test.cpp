// Models that are constructed without memory, before and after they are materialized.

#include "tessera/fsdp/meta_init.h"

#include <gtest/gtest.h>
#include <torch/nn.h>
#include <torch/optim/sgd.h>

#include <functional>
#include <thread>

#include "support/error_matchers.h"
#include "tessera/base/function_ref.h"
#include "tessera/comm/local_ranks.h"
#include "tessera/fsdp/fully_sharded_data_parallel.h"

namespace tessera::fsdp {
namespace {

namespace nn = torch::nn;
using Module = std::shared_ptr<nn::Module>;

struct OwnImpl : nn::Module {
  OwnImpl() {
    weight = register_parameter("weight", torch::randn({4, 3}));
    frozen = register_parameter("frozen", torch::ones({3}, at::kDouble), false);
    positions = register_buffer("positions", torch::arange(3).expand({1, -1}));
    numbers = register_buffer("numbers", torch::tensor({{1.0, 2.0, 3.0}, {4.0, 5.0, 6.0}}));
    vector = register_buffer("vector", torch::tensor(std::vector<float>{1, 2, 3}));
    scalar = register_buffer("scalar", torch::tensor(7, at::kLong));
    mask = register_buffer("mask", torch::full({3, 3}, -1.0).triu(1).masked_fill(torch::eye(3).to(at::kBool), 0.5));
  }
  at::Tensor forward(const at::Tensor& x) {
    return (at::linear(x, weight) * scalar).sum(-1, true) + at::mv(mask, vector) * frozen + numbers[0] + positions;
  }
  at::Tensor weight, frozen, positions, numbers, vector, scalar, mask;
};
TORCH_MODULE(Own);

// A module and a function that computes a number from all its parameters.
struct Kind {
  const char* name;
  std::function<Module()> make;
  std::function<at::Tensor(nn::Module&)> loss;
};

template <typename Holder, typename... Args>
auto make(Args... args) {
  return [=]() -> Module { return Holder(args...).ptr(); };
}

template <typename Holder>
auto loss_of(const at::Tensor& input) {
  return [=](nn::Module& module) {
    return dynamic_cast<typename Holder::ContainedType&>(module).forward(input).square().mean();
  };
}

template <typename Holder>
auto recurrent_loss(const at::Tensor& input) {
  return [=](nn::Module& module) {
    const auto result = dynamic_cast<typename Holder::ContainedType&>(module).forward(input);
    return std::get<0>(result).square().mean();
  };
}

at::Tensor wave(at::IntArrayRef shape) {
  return at::arange(at::empty(shape).numel(), at::kFloat).mul(0.7).sin().reshape(shape);
}

at::Tensor attention_loss(nn::Module& module) {
  auto& attention = dynamic_cast<nn::MultiheadAttentionImpl&>(module);
  const at::Tensor x = wave({5, 2, 8});
  return std::get<0>(attention.forward(x, x, x)).square().mean();
}

std::vector<Kind> kinds() {
  using nn::GRUOptions, nn::MultiheadAttentionOptions;
  const at::Tensor words = at::arange(6).reshape({2, 3});
  return {
      {"Linear", make<nn::Linear>(3, 4), loss_of<nn::Linear>(wave({2, 3}))},
      {"Embedding", make<nn::Embedding>(nn::EmbeddingOptions(6, 4).padding_idx(1)), loss_of<nn::Embedding>(words)},
      {"LayerNorm", make<nn::LayerNorm>(nn::LayerNormOptions({4})), loss_of<nn::LayerNorm>(wave({3, 4}))},
      {"GroupNorm", make<nn::GroupNorm>(2, 4), loss_of<nn::GroupNorm>(wave({3, 4}))},
      {"Conv2d", make<nn::Conv2d>(nn::Conv2dOptions(3, 4, 2)), loss_of<nn::Conv2d>(wave({2, 3, 4, 4}))},
      {"BatchNorm2d", make<nn::BatchNorm2d>(3), loss_of<nn::BatchNorm2d>(wave({2, 3, 4, 4}))},
      {"Gru", make<nn::GRU>(GRUOptions(3, 4).num_layers(2).bidirectional(true)),
       recurrent_loss<nn::GRU>(wave({5, 2, 3}))},
      {"Lstm", make<nn::LSTM>(3, 4), recurrent_loss<nn::LSTM>(wave({5, 2, 3}))},
      {"MultiheadAttention", make<nn::MultiheadAttention>(MultiheadAttentionOptions(8, 2).add_bias_kv(true)),
       attention_loss},
      {"Own", make<Own>(), loss_of<Own>(wave({3, 3}))},
  };
}

Module made_on_meta(FunctionRef<Module()> make) {
  const MetaInit without_memory;
  return make();
}

// Returns parameters and buffers by name.
std::vector<std::pair<std::string, at::Tensor>> tensors_of(const nn::Module& module) {
  std::vector<std::pair<std::string, at::Tensor>> tensors;
  for (const auto& item : module.named_parameters()) tensors.emplace_back(item.key(), item.value());
  for (const auto& item : module.named_buffers()) tensors.emplace_back(item.key(), item.value());
  return tensors;
}

void materialize_as(const nn::Module& module, const nn::Module& model) {
  const c10::NoGradGuard no_grad;
  const auto to = tensors_of(module), from = tensors_of(model);
  ASSERT_EQ(to.size(), from.size());
  for (std::size_t i = 0; i < to.size(); ++i) {
    materialize(to[i].second, at::kCPU);
    to[i].second.copy_(from[i].second);
  }
}

class MetaInitTest : public ::testing::TestWithParam<Kind> {};
INSTANTIATE_TEST_SUITE_P(Modules, MetaInitTest, ::testing::ValuesIn(kinds()),
                         [](const auto& test) { return std::string(test.param.name); });

TEST_P(MetaInitTest, BuildsTheSameModuleWithoutMemory) {
  const Module real = GetParam().make();
  const Module meta = made_on_meta(GetParam().make);
  const auto expected = tensors_of(*real), found = tensors_of(*meta);
  ASSERT_EQ(found.size(), expected.size());
  for (std::size_t i = 0; i < found.size(); ++i) {
    const auto& [name, tensor] = found[i];
    EXPECT_EQ(name, expected[i].first);
    EXPECT_TRUE(tensor.is_meta()) << name;
    EXPECT_EQ(tensor.sizes(), expected[i].second.sizes()) << name;
    EXPECT_EQ(tensor.scalar_type(), expected[i].second.scalar_type()) << name;
    EXPECT_EQ(tensor.requires_grad(), expected[i].second.requires_grad()) << name;
    EXPECT_TRUE(tensor.is_leaf()) << name;
  }
}

TEST_P(MetaInitTest, AMaterializedModuleTrainsAsOneThatWasBuiltWithMemory) {
  const Module real = GetParam().make();
  const Module meta = made_on_meta(GetParam().make);
  const std::vector<at::Tensor> held = meta->parameters();
  torch::optim::SGD real_optimizer(real->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  torch::optim::SGD meta_optimizer(held, torch::optim::SGDOptions(0.1).momentum(0.9));
  materialize_as(*meta, *real);
  for (int step = 0; step < 3; ++step) {
    const at::Tensor expected = GetParam().loss(*real), found = GetParam().loss(*meta);
    EXPECT_TRUE(at::equal(found, expected)) << "step " << step;
    real_optimizer.zero_grad();
    meta_optimizer.zero_grad();
    expected.backward();
    found.backward();
    real_optimizer.step();
    meta_optimizer.step();
  }
  const auto expected = tensors_of(*real), found = tensors_of(*meta);
  for (std::size_t i = 0; i < found.size(); ++i) {
    EXPECT_TRUE(at::equal(found[i].second, expected[i].second)) << found[i].first;
  }
  for (std::size_t i = 0; i < held.size(); ++i) EXPECT_TRUE(held[i].is_same(meta->parameters()[i]));
}

TEST(MetaInitGuardTest, AModelMayBeLargerThanMemory) {
  const MetaInit without_memory;
  const nn::Linear linear(1 << 20, 1 << 20);  // 4 TiB
  EXPECT_EQ(linear->weight.numel(), std::int64_t{1} << 40);
}

TEST(MetaInitGuardTest, WhateverDeviceIsAskedForTheRestIsAsAskedFor) {
  const MetaInit without_memory;
  const auto options = at::TensorOptions().dtype(at::kHalf).device(at::kCUDA).requires_grad(true);
  for (const at::Tensor& tensor :
       {torch::empty({2, 3}, options), torch::randn({2, 3}, options), torch::zeros({2, 3}, options.device(at::kCPU)),
        torch::empty({2, 3}, options.device(at::kCPU).pinned_memory(true)),
        torch::empty_strided({2, 3}, {3, 1}, options), torch::full({2, 3}, 2.5, options),
        torch::tensor({{1., 2., 3.}, {4., 5., 6.}}, options)}) {
    EXPECT_TRUE(tensor.is_meta());
    EXPECT_EQ(tensor.scalar_type(), at::kHalf);
    EXPECT_EQ(tensor.sizes(), at::IntArrayRef({2, 3}));
    EXPECT_TRUE(tensor.requires_grad() && tensor.is_leaf());
    EXPECT_FALSE(tensor.is_pinned());
  }
  nn::Linear linear(3, 4);
  linear->to(at::kCUDA, at::kDouble);
  EXPECT_TRUE(linear->weight.is_meta());
  EXPECT_EQ(linear->weight.scalar_type(), at::kDouble);
}

TEST(MetaInitGuardTest, HoldsInItsThreadUntilItEnds) {
  const auto device = [] { return torch::ones({3}).device().type(); };
  {
    const MetaInit outer;
    {
      const MetaInit inner;
      EXPECT_EQ(device(), at::kMeta);
    }
    EXPECT_EQ(device(), at::kMeta);
    std::thread([&] { EXPECT_EQ(device(), at::kCPU); }).join();
  }
  EXPECT_EQ(device(), at::kCPU);
}

TEST(MetaInitGuardTest, PauseMakesRealTensorsUntilItEnds) {
  const auto device = [] { return torch::ones({3}).device().type(); };
  {
    const MetaInit::Pause alone;
    EXPECT_EQ(device(), at::kCPU);
  }
  EXPECT_EQ(device(), at::kCPU);
  const MetaInit without_memory;
  {
    const MetaInit::Pause pause;
    EXPECT_EQ(torch::arange(4)[2].item<int>(), 2);
    {
      const MetaInit inner;
      EXPECT_EQ(device(), at::kMeta);
    }
    EXPECT_EQ(device(), at::kCPU);
  }
  EXPECT_EQ(device(), at::kMeta);
}

TEST(MetaInitGuardTest, ValuesThatAreNotThereAreNotMadeUp) {
  const MetaInit without_memory;
  EXPECT_THROW(torch::linspace(0, 1, 3)[1].item<float>(), c10::NotImplementedError);
  EXPECT_THROW(torch::ones({3}).data_ptr<float>(), c10::Error);
  EXPECT_THROW(torch::randperm(5), c10::NotImplementedError);
}

at::Tensor on_meta(at::IntArrayRef shape, bool requires_grad = false) {
  return at::empty(shape, at::device(at::kMeta)).requires_grad_(requires_grad);
}

TEST(MaterializeTest, IsDoneInPlaceOnceForAllWhoHoldIt) {
  const at::Tensor meta = on_meta({2, 3}, true), held = meta;
  const auto* const identity = meta.unsafeGetTensorImpl();
  meta.mutable_grad() = on_meta({2, 3});
  materialize(meta, at::kCPU);
  EXPECT_EQ(held.unsafeGetTensorImpl(), identity);
  EXPECT_TRUE(held.is_cpu() && held.requires_grad() && held.is_leaf());
  EXPECT_FALSE(held.grad().defined());
  held.detach().fill_(3.0);
  materialize(meta, at::kCPU);
  EXPECT_TRUE(at::equal(meta, at::full({2, 3}, 3.0)));
}

TEST(MaterializeTest, AGraphThatWasBuiltBeforeDoesNotStandInTheWay) {
  const at::Tensor meta = on_meta({2, 3}, true);
  int calls = 0;
  meta.register_hook([&](const at::Tensor&) { ++calls; });
  const at::Tensor old = meta.mul(2.0);  // keeps the gradient accumulator for meta alive
  materialize(meta, at::kCPU);
  meta.detach().fill_(3.0);
  meta.square().sum().backward();
  EXPECT_EQ(calls, 1);
  EXPECT_TRUE(at::equal(meta.grad(), at::full({2, 3}, 6.0)));
}

TEST(MaterializeTest, DenseTensorsKeepTheirStrides) {
  const at::Tensor transposed = on_meta({3, 2}).t(), expanded = on_meta({1, 3}).expand({4, 3});
  materialize(transposed, at::kCPU);
  materialize(expanded, at::kCPU);
  EXPECT_EQ(transposed.strides(), at::IntArrayRef({1, 2}));
  EXPECT_EQ(expanded.strides(), at::IntArrayRef({3, 1}));
  transposed.zero_();
  expanded.copy_(wave({4, 3}));
  EXPECT_TRUE(at::equal(expanded, wave({4, 3})));
}

TEST(MaterializeTest, GivesMemoryUnderMetaInitAndInInferenceMode) {
  at::Tensor meta;
  {
    const MetaInit without_memory;
    meta = torch::empty({3}).requires_grad_();
    const c10::InferenceMode inference;
    materialize(meta, at::kCPU);
    EXPECT_TRUE(meta.is_cpu());
    const at::Tensor other = torch::empty({3});
    materialize(other, at::kCPU);
    other.fill_(1.0);
    EXPECT_TRUE(other.is_cpu() && other.is_inference());
  }
  meta.detach().fill_(2.0);
  meta.square().sum().backward();
  EXPECT_TRUE(at::equal(meta.grad(), at::full({3}, 4.0)));
}

struct TwoUnitsImpl : nn::Module {
  TwoUnitsImpl() {
    first = register_module("first", Wrap<nn::Linear>(3, 5));
    second = register_module("second", Wrap<nn::Linear>(5, 2));
    factor = register_buffer("factor", torch::ones({2}));
  }
  at::Tensor forward(const at::Tensor& x) { return second(at::tanh(first(x))) * factor; }
  Wrap<nn::Linear> first{nullptr}, second{nullptr};
  at::Tensor factor;
};
TORCH_MODULE(TwoUnits);

void give_values(nn::Module& module) {
  const c10::NoGradGuard no_grad;
  for (const at::Tensor& param : module.parameters(/*recurse=*/false)) param.copy_(wave(param.sizes()));
  for (const at::Tensor& buffer : module.buffers(/*recurse=*/false)) buffer.fill_(0.5);
}

TEST(MaterializeTest, AShardedModelGetsItsMemoryWhenItIsSharded) {
  run_local(2, [](const ProcessGroup& group) {
    TwoUnits real;
    real->apply(give_values);
    const TwoUnits meta = [] {
      const MetaInit without_memory;
      return TwoUnits();
    }();
    Options options;
    options.param_init_fn = give_values;
    FullyShardedDataParallel<TwoUnits> model(meta, group, options);
    const at::Tensor expected = real(wave({4, 3})), found = model(wave({4, 3}));
    EXPECT_TRUE(at::equal(found, expected));
    expected.square().sum().backward();
    found.square().sum().backward();
    SummonOptions with_grads;
    with_grads.with_grads = true;
    model.summon_full_params(
        [&] {
          for (const auto& item : real->named_parameters()) {
            EXPECT_TRUE(at::equal(meta->named_parameters()[item.key()].grad(), item.value().grad())) << item.key();
          }
        },
        with_grads);
  });
}

TEST(MaterializeTest, Refusals) {
  EXPECT_ERROR(materialize(at::Tensor(), at::kCPU), ErrorCode::invalid_argument, "undefined");
  EXPECT_ERROR(materialize(on_meta({2}), at::kMeta), ErrorCode::invalid_argument, "expected a device with memory");
  EXPECT_ERROR(materialize(on_meta({2}, true).mul(2), at::kCPU), ErrorCode::invalid_argument, "expected a leaf");
  const at::Tensor sparse = at::empty({2}, at::device(at::kMeta).layout(at::kSparse));
  EXPECT_ERROR(materialize(sparse, at::kCPU), ErrorCode::unsupported, "expected a strided tensor");
}

}  // namespace
}  // namespace tessera::fsdp
