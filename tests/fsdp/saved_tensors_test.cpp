#include "tessera/fsdp/saved_tensors.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "fsdp/grads.h"
#include "fsdp/small_model.h"
#include "support/error_matchers.h"
#include "tessera/comm/local_ranks.h"
#include "tessera/fsdp/activation_checkpoint.h"

namespace tessera::fsdp {
namespace {

// Counts what is saved and what backward takes; keeps another copy of each tensor.
struct Counting {
  PackHook hook() {
    return [this](const at::Tensor& saved) -> std::function<at::Tensor()> {
      ++packed;
      return [this, copy = saved.detach().clone()] {
        ++unpacked;
        return copy;
      };
    };
  }
  int packed = 0, unpacked = 0;
};

at::Tensor some(double phase) { return at::arange(6, at::kDouble).add(phase).sin().reshape({2, 3}).requires_grad_(); }

TEST(SavedTensorHooksTest, BackwardGetsWhatTheHookKept) {
  const at::Tensor a = some(0), b = some(1), c = some(0), d = some(1);
  at::exp(a * b).sum().backward();
  Counting counting;
  at::Tensor result;
  {
    const SavedTensorHooks hooks(counting.hook());
    result = at::exp(c * d);  // saves both factors, and its own result
  }
  EXPECT_EQ(counting.packed, 3);
  EXPECT_EQ(counting.unpacked, 0);
  result.sum().backward();
  EXPECT_EQ(counting.unpacked, 3);
  EXPECT_TRUE(at::equal(a.grad(), c.grad()) && at::equal(b.grad(), d.grad()));
  at::exp(c * d);
  EXPECT_EQ(counting.packed, 3);
}

TEST(SavedTensorHooksTest, TheInnermostHookOfAThreadApplies) {
  Counting outer, inner;
  const at::Tensor a = some(0);
  const SavedTensorHooks of_outer(outer.hook());
  {
    const SavedTensorHooks of_inner(inner.hook());
    at::exp(a);
  }
  EXPECT_EQ(inner.packed, 1);
  std::thread([&] { at::exp(a); }).join();
  EXPECT_EQ(outer.packed, 0);
  at::exp(a);
  EXPECT_EQ(outer.packed, 1);
}

TEST(SavedTensorHooksTest, TheGraphIsNotKeptByWhatItSaves) {
  bool is_alive = true;
  struct Probe {
    explicit Probe(bool& alive) : is_alive(alive) {}
    ~Probe() { is_alive = false; }
    bool& is_alive;
  };
  {
    const SavedTensorHooks hooks(save_on_cpu());
    const at::Tensor result = at::exp(some(0));  // saves its own result
    result.register_hook([probe = std::make_shared<Probe>(is_alive)](const at::Tensor&) {});
  }
  EXPECT_FALSE(is_alive);
}

TEST(SavedTensorHooksTest, WhatAHookThrowsReachesTheCaller) {
  const at::Tensor a = some(0);
  {
    const SavedTensorHooks hooks(
        [](const at::Tensor&) -> std::function<at::Tensor()> { throw std::runtime_error("no room"); });
    EXPECT_THROW(at::exp(a), std::runtime_error);
  }
  at::exp(a).sum().backward();
  EXPECT_ERROR(SavedTensorHooks(nullptr), ErrorCode::invalid_argument, "the hook is null");
}

template <template <typename> class... Wrappers>
struct OfBlock;
template <>
struct OfBlock<> {
  using type = Block;
};
template <template <typename> class First, template <typename> class... Rest>
struct OfBlock<First, Rest...> {
  using type = First<typename OfBlock<Rest...>::type>;
};

template <typename Layer>
struct LayersImpl : torch::nn::Module {
  LayersImpl() {
    first = this->register_module("first", Layer(5));
    second = this->register_module("second", Layer(5));
    fill(*this);
  }
  at::Tensor forward(const at::Tensor& x) { return second(first(x)); }
  Layer first{nullptr}, second{nullptr};
};
template <typename Layer>
using Layers = torch::nn::ModuleHolder<LayersImpl<Layer>>;

template <typename Layer>
void expect_same_training() {
  Layers<Block> alone;
  backward_of_all(alone, {0}, 2);
  Layers<Layer> offloaded;
  backward_of_all(offloaded, {0}, 2);
  run_local(2, [&](const ProcessGroup& group) {
    for (const Options& way : kWays) {
      FullyShardedDataParallel<Layers<Layer>> model(Layers<Layer>(), group, way);
      for (int step = 0; step < 2; ++step) {  // the second prefetches
        model.zero_grad();
        loss_of(model(batch_of(0, group.rank()))).backward();
        expect_same_grads(unsharded_grads(model), *alone);
      }
    }
  });
}

// PyTorch: test_checkpoint_fsdp_wrapping, test_basic_checkpoint_end_to_end with offloaded activations.
TEST(OffloadedTest, UnitsTrainAsOneProcessDoes) {
  expect_same_training<OfBlock<Wrap, Offloaded>::type>();
  expect_same_training<OfBlock<Wrap, Offloaded, Checkpointed>::type>();
  expect_same_training<OfBlock<Offloaded, Wrap>::type>();
}

// Counts what would be moved, if the tensors were on another device.
TEST(OffloadedTest, ParametersAreNotCopied) {
  Block block(5);
  const at::Tensor x = at::ones({2, 5});
  std::vector<const void*> kept;
  const PackHook hook = save_on_cpu();
  {
    const SavedTensorHooks hooks([&](const at::Tensor& saved) {
      const auto unpack = hook(saved);
      kept.push_back(unpack().data_ptr());
      EXPECT_EQ(unpack().data_ptr(), saved.data_ptr());  // on the CPU, nothing is copied
      return unpack;
    });
    block->forward(x).sum().backward();
  }
  EXPECT_FALSE(kept.empty());
}

}  // namespace
}  // namespace tessera::fsdp
