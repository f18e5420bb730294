// Activation checkpointing compared with plain calls: equal bits, less memory.

#include "tessera/fsdp/activation_checkpoint.h"

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/modules/rnn.h>

#include <map>
#include <memory>
#include <span>
#include <stdexcept>
#include <string_view>

#include "fsdp/autocast.h"
#include "support/error_matchers.h"
#include "tessera/comm/local_ranks.h"
#include "tessera/fsdp/fully_sharded_data_parallel.h"

namespace tessera::fsdp {

namespace own {

struct Output {
  at::Tensor value;
  int number = 0;
};
void visit_tensors(Output& output, const TensorVisitor& visit) { visit(output.value); }

}  // namespace own

namespace {

constexpr std::int64_t kWidth = 6;

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(double dropout = 0.0) : probability(dropout) {
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})));
    up = register_module("up", torch::nn::Linear(kWidth, 2 * kWidth));
    down = register_module("down", torch::nn::Linear(2 * kWidth, kWidth));
  }
  at::Tensor forward(const at::Tensor& x) {
    ++calls;
    const at::Tensor wide = at::gelu(up(norm(x)));
    intermediate = wide.storage().getWeakStorageImpl();
    return x + at::dropout(down(wide), probability, is_training());
  }
  bool holds_intermediate() const { return !intermediate.expired(); }

  double probability;
  int calls = 0;
  c10::weak_intrusive_ptr<c10::StorageImpl> intermediate{c10::intrusive_ptr<c10::StorageImpl>()};
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear up{nullptr}, down{nullptr};
};
TORCH_MODULE(Block);

at::Tensor wave(at::IntArrayRef shape, double phase = 0.0) {
  return at::arange(at::empty(shape).numel(), at::kFloat).add(phase).mul(0.7).sin().reshape(shape);
}
at::Tensor input() { return wave({4, kWidth}).requires_grad_(true); }

void fill(const torch::nn::Module& module) {
  const c10::NoGradGuard no_grad;
  double phase = 0;
  for (const at::Tensor& param : module.parameters()) param.detach().copy_(wave(param.sizes(), phase += 3));
}

void expect_same(const at::Tensor& found, const at::Tensor& expected, const std::string& what) {
  ASSERT_EQ(found.defined(), expected.defined()) << what;
  EXPECT_TRUE(!expected.defined() || at::equal(found, expected)) << what << "\n" << found << "\n" << expected;
}

// Compares the gradients of two modules with the same parameters.
void expect_same_gradients(const torch::nn::Module& found, const torch::nn::Module& expected) {
  const auto ours = found.named_parameters(), theirs = expected.named_parameters();
  ASSERT_EQ(ours.size(), theirs.size());
  for (std::size_t i = 0; i < ours.size(); ++i) {
    ASSERT_EQ(ours[i].key(), theirs[i].key());
    expect_same(ours[i].value().grad(), theirs[i].value().grad(), ours[i].key());
  }
}

// Runs three blocks with dropout before, between and after them. Returns the result and the gradient of the input.
template <typename Holder>
std::pair<at::Tensor, at::Tensor> run_blocks(std::vector<Holder>& blocks) {
  at::manual_seed(5);
  const at::Tensor x = input();
  at::Tensor y = at::dropout(x, 0.5, true);
  for (Holder& block : blocks) y = at::dropout(block->forward(y), 0.3, true);
  y.square().sum().backward();
  return {at::cat({y.detach(), at::rand({4, kWidth})}), x.grad()};  // also the next random numbers
}

template <typename Holder>
std::vector<Holder> make_blocks(double dropout) {
  std::vector<Holder> blocks;
  for (int i = 0; i < 3; ++i) {
    blocks.push_back(Holder(dropout));
    fill(*blocks.back());
  }
  return blocks;
}

TEST(CheckpointTest, GradientsAreBitEqualWithDropout) {
  auto plain = make_blocks<Block>(0.4);
  auto checkpointed = make_blocks<Checkpointed<Block>>(0.4);
  const auto [expected, expected_gradient] = run_blocks(plain);
  const auto [found, gradient] = run_blocks(checkpointed);
  expect_same(found, expected, "result");
  expect_same(gradient, expected_gradient, "gradient of the input");
  for (std::size_t i = 0; i < plain.size(); ++i) {
    expect_same_gradients(*checkpointed[i], *plain[i]);
    EXPECT_EQ(plain[i]->calls, 1);
    EXPECT_EQ(checkpointed[i]->calls, 2);
  }
}

TEST(CheckpointTest, NothingIsKeptButTheInputs) {
  Block plain;
  Checkpointed<Block> checkpointed;
  const at::Tensor plain_result = plain(input()), result = checkpointed(input());
  EXPECT_TRUE(plain->holds_intermediate());
  EXPECT_FALSE(checkpointed->holds_intermediate());
  result.sum().backward();
  EXPECT_FALSE(checkpointed->holds_intermediate());
}

TEST(CheckpointTest, TheInputsAreKeptUntilBackwardAndNoLonger) {
  Checkpointed<Block> block;
  at::Tensor x = at::mul(input(), 2.0);
  const auto weak = x.storage().getWeakStorageImpl();
  const at::Tensor result = block(x);
  x.reset();
  EXPECT_FALSE(weak.expired());
  result.sum().backward();
  EXPECT_TRUE(weak.expired());
}

TEST(CheckpointTest, InNoGradItIsAPlainCall) {
  Checkpointed<Block> block;
  const c10::NoGradGuard no_grad;
  EXPECT_FALSE(block(input()).requires_grad());
  EXPECT_EQ(block->calls, 1);
  const at::Tensor x = input();
  EXPECT_TRUE(activation_checkpoint([](const at::Tensor& t) { return t; }, x).is_same(x));
}

TEST(CheckpointTest, ParametersGetGradientsIfNoInputNeedsOne) {
  Block plain;
  Checkpointed<Block> checkpointed;
  fill(*plain);
  fill(*checkpointed);
  const at::Tensor x = input().detach();
  plain(x).square().sum().backward();
  checkpointed(x).square().sum().backward();
  expect_same_gradients(*checkpointed, *plain);
  EXPECT_FALSE(x.grad().defined());
  const at::Tensor of_nothing = activation_checkpoint([&] { return plain(x); });
  EXPECT_TRUE(of_nothing.requires_grad());
  of_nothing.sum().backward();
}

TEST(CheckpointTest, AFrozenModuleNeedsNoGradient) {
  Checkpointed<Block> block;
  for (const at::Tensor& param : block->parameters()) param.set_requires_grad(false);
  EXPECT_FALSE(block(input().detach()).requires_grad());
  const at::Tensor x = input();
  block(x).sum().backward();
  EXPECT_TRUE(x.grad().defined());
  EXPECT_EQ(block->calls, 3);
}

TEST(CheckpointTest, ArgumentsOfAllKindsPass) {
  const at::Tensor x = input(), y = input(), z = input();
  const auto function = [](const at::Tensor& a, std::vector<at::Tensor> more, const std::optional<at::Tensor>& none,
                           const own::Output& mine, int times, const std::string& text, const char* letters,
                           at::IntArrayRef shape, std::span<const double> factors, std::string_view view,
                           std::unique_ptr<int>* pointer) {
    EXPECT_FALSE(none.has_value());
    EXPECT_EQ(text + letters + std::string(view), "abcdef");
    const at::Tensor sum = a * more.at(0) + more.at(1) * mine.value * mine.number;
    return (sum * times).reshape(shape) * factors[0] * **pointer;
  };
  auto number = std::make_unique<int>(3);
  const auto call = [&](auto&& how) {
    const std::vector<std::int64_t> shape{kWidth, 4};
    const std::vector<double> factors{0.5};
    const std::string text = "ef";
    return how(function, x, std::vector<at::Tensor>{y, z}, std::optional<at::Tensor>(), own::Output{x, 2}, 3,
               std::string("ab"), "cd", at::IntArrayRef(shape), std::span<const double>(factors),
               std::string_view(text), &number);
  };
  const auto gradients = [&](const at::Tensor& result) {
    result.square().sum().backward();
    std::vector<at::Tensor> found;
    for (const at::Tensor& tensor : {x, y, z}) found.push_back(std::exchange(tensor.mutable_grad(), at::Tensor()));
    return found;
  };
  const at::Tensor expected = call([](auto&& f, auto&&... args) { return f(std::forward<decltype(args)>(args)...); });
  const at::Tensor found =
      call([](auto&& f, auto&&... args) { return activation_checkpoint(f, std::forward<decltype(args)>(args)...); });
  expect_same(found, expected, "result");
  const auto ours = gradients(found), theirs = gradients(expected);
  for (std::size_t i = 0; i < ours.size(); ++i) expect_same(ours[i], theirs[i], std::to_string(i));
}

TEST(CheckpointTest, WhatTheFunctionChangesItChangesOnce) {
  int count = 0, seen = 0;
  const auto function = [&seen](const at::Tensor& x, int& counter, std::vector<int> moved) {
    seen = counter + static_cast<int>(moved.size());
    ++counter;
    return x * 2;
  };
  const at::Tensor result = activation_checkpoint(function, input(), count, std::vector<int>{1, 2});
  EXPECT_EQ(count, 1);
  EXPECT_EQ(seen, 2);
  count = 70;
  result.sum().backward();
  EXPECT_EQ(count, 70);
  EXPECT_EQ(seen, 2);
}

TEST(CheckpointTest, ResultsOfAllKindsPass) {
  const auto function = [](const at::Tensor& x) {
    std::map<std::string, at::Tensor> named{{"twice", x * 2}};
    return std::make_tuple(x.sin(), 7, std::string("text"), named, own::Output{x.cos(), 3},
                           std::vector<at::Tensor>{x.exp()}, at::Tensor());
  };
  const auto loss = [](auto& result) {
    auto& [sine, number, text, named, mine, list, undefined] = result;
    EXPECT_EQ(number, 7);
    EXPECT_EQ(text, "text");
    EXPECT_EQ(mine.number, 3);
    EXPECT_FALSE(undefined.defined());
    return (sine + named.at("twice") * mine.value + list.at(0)).square().sum();
  };
  const at::Tensor x = input(), y = input();
  auto expected = function(x);
  auto found = activation_checkpoint(function, y);
  loss(expected).backward();
  loss(found).backward();
  expect_same(y.grad(), x.grad(), "gradient");
  EXPECT_EQ(activation_checkpoint([](const at::Tensor&) { return 3; }, x), 3);
}

TEST(CheckpointTest, IntegersHaveNoGradient) {
  const at::Tensor x = input();
  auto [values, indices] = activation_checkpoint([](const at::Tensor& t) { return t.max(1); }, x);
  EXPECT_TRUE(values.requires_grad());
  EXPECT_FALSE(indices.requires_grad());
  values.sum().backward();
  EXPECT_EQ(x.grad().sum().item<double>(), 4.0);
}

TEST(CheckpointTest, WhatIsNotUsedGetsNoGradient) {
  const at::Tensor x = input(), y = input();
  const auto function = [](const at::Tensor& a, const at::Tensor& b) { return std::make_tuple(a * 2, b * 3); };
  std::get<0>(activation_checkpoint(function, x, y)).sum().backward();
  EXPECT_TRUE(x.grad().defined());
  EXPECT_FALSE(y.grad().defined());
}

TEST(CheckpointTest, InputsNeedGradientsAgainAsBefore) {
  const at::Tensor indices = at::tensor({0, 2}, at::kLong), plain = input().detach();
  std::vector<bool> needed;
  const auto function = [&](const at::Tensor& a, const at::Tensor& b, const at::Tensor& i) {
    needed = {a.requires_grad(), b.requires_grad(), i.requires_grad()};
    return (a * b).index_select(0, i);
  };
  const at::Tensor x = input();
  activation_checkpoint(function, x, plain, indices).sum().backward();
  EXPECT_EQ(needed, std::vector<bool>({true, false, false}));
  EXPECT_EQ(x.grad()[2][1].item<float>(), plain[2][1].item<float>());
}

TEST(CheckpointTest, AResultThatDependsOnNothingGivesNoGradient) {
  const at::Tensor x = input();
  const at::Tensor y = activation_checkpoint([](const at::Tensor& t) { return t.detach() * 2; }, x);
  (x + y).sum().backward();
  EXPECT_TRUE(at::equal(x.grad(), at::ones({4, kWidth})));
}

struct Unknown {
  at::Tensor tensor;
};
static_assert(detail::is_visited<std::tuple<at::Tensor, int, std::optional<std::vector<at::Tensor>>, const char*>>());
static_assert(detail::is_visited<std::map<int, own::Output>>() && detail::is_visited<std::vector<bool>>());
static_assert(!detail::is_visited<Unknown>() && !detail::is_visited<std::vector<Unknown>>());
static_assert(!detail::is_visited<std::pair<int, Unknown>>() && !detail::is_visited<std::shared_ptr<at::Tensor>>());
static_assert(!detail::is_visited<c10::List<at::Tensor>>());

TEST(CheckpointTest, AnInputMayComeTwiceAndGoOutAsItIs) {
  const auto function = [](const at::Tensor& a, const at::Tensor& b) {
    return std::make_tuple(a, a * b / 3 + a * 0.1 - b.sin(), b.t());
  };
  const auto gradient = [&](auto&& call) {
    const at::Tensor x = input();
    const at::Tensor y = x * 1.1;
    const auto [same, product, view] = call(y);
    EXPECT_FALSE(same.is_same(y));
    (same * product + view.t()).sum().backward();
    return x.grad();
  };
  // A plain call returns the tensor itself.
  const at::Tensor expected = gradient([&](const at::Tensor& y) {
    auto result = function(y, y);
    std::get<0>(result) = std::get<0>(result).view_as(y);
    return result;
  });
  expect_same(gradient([&](const at::Tensor& y) { return activation_checkpoint(function, y, y); }), expected,
              "gradient");
}

TEST(CheckpointTest, AResultMayBeChangedInPlace) {
  const auto gradient = [](auto&& call) {
    const at::Tensor x = input();
    at::Tensor y = call(x);
    y.mul_(3.0).relu_();
    y.square().sum().backward();
    return x.grad();
  };
  const auto function = [](const at::Tensor& x) { return x.sin().reshape({-1}); };
  expect_same(gradient([&](const at::Tensor& x) { return activation_checkpoint(function, x); }), gradient(function),
              "gradient");
}

TEST(CheckpointTest, AParameterThatIsReturnedStaysOne) {
  const torch::nn::Linear linear(3, 4);
  const at::Tensor result = activation_checkpoint([&](const at::Tensor& /*x*/) { return linear->weight; }, input());
  EXPECT_TRUE(linear->weight.is_leaf());
  result.sum().backward();
  EXPECT_TRUE(at::equal(linear->weight.grad(), at::ones({4, 3})));
}

TEST(CheckpointTest, CheckpointsNest) {
  auto plain = make_blocks<Block>(0.4), blocks = make_blocks<Block>(0.4);
  const auto gradient = [](auto&& call) {
    at::manual_seed(9);
    const at::Tensor x = input();
    call(x).square().sum().backward();
    return x.grad();
  };
  const at::Tensor expected = gradient([&](const at::Tensor& x) { return plain[2](plain[1](plain[0](x))); });
  const at::Tensor found = gradient([&](const at::Tensor& x) {
    return activation_checkpoint(
        [&](const at::Tensor& a) {
          const at::Tensor b = activation_checkpoint([&](const at::Tensor& t) { return blocks[0](t); }, a);
          return activation_checkpoint([&](const at::Tensor& t) { return blocks[2](blocks[1](t)); }, b);
        },
        x);
  });
  expect_same(found, expected, "gradient");
  for (std::size_t i = 0; i < plain.size(); ++i) expect_same_gradients(*blocks[i], *plain[i]);
  EXPECT_EQ(blocks[0]->calls, 3);
}

TEST(CheckpointTest, AGraphThatIsRetainedCanBeGoneThroughTwice) {
  Checkpointed<Block> block(0.5);
  fill(*block);
  at::manual_seed(3);
  const at::Tensor x = input();
  const at::Tensor loss = block(x).sum();
  loss.backward({}, /*retain_graph=*/true);
  const at::Tensor once = x.grad().clone();
  loss.backward();
  EXPECT_TRUE(at::equal(x.grad(), once * 2));
  EXPECT_EQ(block->calls, 3);
  EXPECT_THROW(loss.backward(), c10::Error);
}

TEST(CheckpointTest, TheModuleLivesUntilBackward) {
  auto block = std::make_unique<Checkpointed<Block>>();
  const std::weak_ptr<torch::nn::Module> weak = block->ptr();
  at::Tensor result = (*block)(input());
  block.reset();
  EXPECT_FALSE(weak.expired());
  result.sum().backward();
  result.reset();
  EXPECT_TRUE(weak.expired());
}

TEST(CheckpointTest, AFunctionThatCantBeCopiedIsMoved) {
  const at::Tensor x = input();
  auto factor = std::make_unique<at::Tensor>(at::full({}, 3.0));
  auto function = [factor = std::move(factor)](const at::Tensor& t) { return t * *factor; };
  activation_checkpoint(std::move(function), x).sum().backward();
  EXPECT_TRUE(at::equal(x.grad(), at::full({4, kWidth}, 3.0)));
}

// Runs `forward` under autocast to bfloat16, and backward outside of it. Returns the gradient of the input.
template <typename Forward>
at::Tensor autocast_gradient(Forward&& forward) {
  const at::Tensor x = input();
  const Autocast before = Autocast::now();
  Autocast low = before;
  low.turn_on(at::kCPU, at::kBFloat16);
  low.restore();
  const at::Tensor y = forward(x);
  before.restore();
  y.to(at::kFloat).square().sum().backward();
  EXPECT_FALSE(Autocast::now().is_on());
  return x.grad();
}

TEST(CheckpointTest, AutocastIsThatOfForward) {
  Block plain, exact;
  Checkpointed<Block> checkpointed;
  for (const torch::nn::Module* module : {plain.get(), exact.get(), static_cast<BlockImpl*>(checkpointed.get())}) {
    fill(*module);
  }
  const at::Tensor expected = autocast_gradient(plain), found = autocast_gradient(checkpointed);
  expect_same(found, expected, "gradient");
  expect_same_gradients(*checkpointed, *plain);
  const at::Tensor x = input();
  exact(x).square().sum().backward();
  EXPECT_FALSE(at::equal(x.grad(), expected));
}

// A tensor that was cast without a graph is not reused where a graph is recorded.
TEST(CheckpointTest, WhatAutocastCastsIsNotTakenBesides) {
  torch::nn::Linear plain(kWidth, 3), checkpointed(kWidth, 3);
  fill(*plain);
  fill(*checkpointed);
  autocast_gradient([&](const at::Tensor& x) { return plain->forward(x) + plain->forward(x * 2); });
  autocast_gradient([&](const at::Tensor& x) {
    const auto forward = [&](const at::Tensor& t) { return checkpointed->forward(t); };
    const at::Tensor first = activation_checkpoint(forward, x);
    return first + forward(x * 2);
  });
  for (const auto& item : plain->named_parameters()) {
    const at::Tensor found = checkpointed->named_parameters()[item.key()].grad();
    EXPECT_TRUE(at::allclose(found, item.value().grad(), 0.02, 0.02)) << item.key();
  }
}

TEST(CheckpointTest, WhatGoesWrongIsSaid) {
  const at::Tensor x = input();
  const auto in_place = [](const at::Tensor& a, at::Tensor b) { return a + b.add_(1); };
  EXPECT_ERROR(activation_checkpoint(in_place, x, x.detach().clone()), ErrorCode::invalid_argument,
               "changed tensor 1 of its arguments in place");
  int calls = 0;
  const auto more = [&](const at::Tensor& t) { return std::vector<at::Tensor>(static_cast<std::size_t>(++calls), t); };
  EXPECT_ERROR(activation_checkpoint(more, x).at(0).sum().backward(), ErrorCode::invalid_argument,
               "the recomputed result has 2 tensors, expected 1 as in forward");
  const auto larger = [&](const at::Tensor& t) { return at::cat({t, at::ones({++calls, kWidth})}); };
  calls = 0;
  EXPECT_ERROR(activation_checkpoint(larger, x).sum().backward(), ErrorCode::invalid_argument,
               "recomputed tensor 0 of the result has shape [6, 6], expected [5, 6]");
  const auto function = [](const at::Tensor& t) { return t.sin(); };
  EXPECT_ERROR(torch::autograd::grad({activation_checkpoint(function, x).sum()}, {x}), ErrorCode::unsupported,
               "only some gradients were requested");
  EXPECT_ERROR(activation_checkpoint(function, x).sum().backward({}, true, true), ErrorCode::unsupported,
               "create_graph is true");
}

TEST(CheckpointTest, AnInputThatIsChangedBeforeBackwardIsNoticed) {
  const at::Tensor x = at::mul(input(), 2.0);
  const at::Tensor y = activation_checkpoint([](const at::Tensor& t) { return t.sin(); }, x);
  x.detach().add_(1.0);
  EXPECT_THROW(y.sum().backward(), c10::Error);
}

TEST(CheckpointTest, WhatTheFunctionThrowsInBackwardComesOut) {
  int calls = 0;
  const auto function = [&](const at::Tensor& t) {
    if (++calls == 2) throw std::out_of_range("the second time");
    return at::dropout(t, 0.5, true);
  };
  const at::Tensor y = activation_checkpoint(function, input());
  at::manual_seed(4);
  const at::Tensor next = at::rand({3});
  at::manual_seed(4);
  EXPECT_THROW(y.sum().backward(), std::out_of_range);
  EXPECT_TRUE(at::equal(at::rand({3}), next));
}

TEST(CheckpointedTest, IsTheModuleInAllElse) {
  torch::nn::Sequential sequential(Checkpointed<Block>(0.0), torch::nn::Tanh(), Wrap<Checkpointed<Block>>(0.0),
                                   Checkpointed<Wrap<Block>>(0.0));
  torch::nn::Sequential plain(Block(0.0), torch::nn::Tanh(), Block(0.0), Block(0.0));
  fill(*sequential);
  fill(*plain);
  const at::Tensor x = input(), y = input();
  const at::Tensor found = sequential->forward(x), expected = plain->forward(y);
  expect_same(found, expected, "result");
  found.square().sum().backward();
  expect_same_gradients(*sequential, [&] {
    expected.square().sum().backward();
    return std::ref(static_cast<const torch::nn::Module&>(*plain));
  }());
  expect_same(x.grad(), y.grad(), "gradient");
  EXPECT_EQ(sequential[0]->as<Block>()->calls, 2);
}

TEST(CheckpointedTest, RecurrentModulesWork) {
  torch::nn::GRU plain(kWidth, 3);
  Checkpointed<torch::nn::GRU> checkpointed(kWidth, 3);
  fill(*plain);
  fill(*checkpointed);
  const at::Tensor x = wave({5, 2, kWidth}).requires_grad_(true), y = wave({5, 2, kWidth}).requires_grad_(true);
  const auto loss = [](const std::tuple<at::Tensor, at::Tensor>& result) {
    return std::get<0>(result).square().sum() + std::get<1>(result).sum();
  };
  loss(plain(x, at::Tensor())).backward();
  loss(checkpointed(y, at::Tensor())).backward();
  expect_same(y.grad(), x.grad(), "gradient");
  expect_same_gradients(*checkpointed, *plain);
}

// Two units of blocks. One of them is called twice.
template <typename Holder>
struct ModelImpl : torch::nn::Module {
  ModelImpl() {
    first = register_module("first", Holder(0.0));
    second = register_module("second", Holder(0.0));
  }
  at::Tensor forward(const at::Tensor& x) { return second->forward(at::tanh(first->forward(second->forward(x)))); }
  Holder first{nullptr}, second{nullptr};
};

template <typename Holder>
std::vector<at::Tensor> sharded_gradients(const ProcessGroup& group, ShardingStrategy strategy) {
  auto module = std::make_shared<ModelImpl<Holder>>();
  fill(*module);
  Options options;
  options.strategy = strategy;
  FullyShardedDataParallel<ModelImpl<Holder>> model(module, group, options);
  EXPECT_EQ(model.unit_count(), 2u);
  for (int step = 0; step < 2; ++step) model(wave({4, kWidth}, group.rank() + step)).square().sum().backward();
  std::vector<at::Tensor> gradients;
  SummonOptions with_grads;
  with_grads.with_grads = true;
  model.summon_full_params(
      [&] {
        for (const at::Tensor& param : module->parameters()) gradients.push_back(param.grad().clone());
      },
      with_grads);
  return gradients;
}

TEST(CheckpointedTest, UnitsOfAShardedModelGetTheSameGradients) {
  run_local(2, [](const ProcessGroup& group) {
    for (const ShardingStrategy strategy :
         {ShardingStrategy::full_shard, ShardingStrategy::shard_grad_op, ShardingStrategy::no_shard}) {
      const auto expected = sharded_gradients<Wrap<Block>>(group, strategy);
      const auto inside = sharded_gradients<Wrap<Checkpointed<Block>>>(group, strategy);
      const auto outside = sharded_gradients<Checkpointed<Wrap<Block>>>(group, strategy);
      ASSERT_EQ(inside.size(), expected.size());
      ASSERT_EQ(outside.size(), expected.size());
      for (std::size_t i = 0; i < expected.size(); ++i) {
        for (const at::Tensor& found : {inside[i], outside[i]}) {
          if (i < expected.size() / 2) {
            EXPECT_TRUE(at::equal(found, expected[i])) << "first, parameter " << i;
          } else {  // a sum over two calls, which may have been averaged over the ranks separately
            EXPECT_TRUE(at::allclose(found, expected[i], 1e-5, 1e-5)) << "second, parameter " << i;
          }
        }
      }
    }
  });
}

}  // namespace
}  // namespace tessera::fsdp
