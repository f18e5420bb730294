// Flat parameters on several ranks: parameters while sharded and unsharded, and their gradients.

#include "tessera/fsdp/flat_param_handle.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>

#include "fsdp/cases.h"
#include "support/error_matchers.h"
#include "tessera/base/function_ref.h"
#include "tessera/comm/local_ranks.h"

namespace tessera::fsdp {
namespace {

using ::testing::ElementsAre;

// The parameters of a small network: one is not contiguous, one is unused and one has a single element.
std::vector<NamedParameter> make_params(at::ScalarType dtype = at::kDouble) {
  const auto make = [&](at::IntArrayRef shape, double scale) {
    at::Tensor values = at::arange(at::empty(shape).numel(), at::kDouble).mul(scale).sin().reshape(shape).to(dtype);
    return values.requires_grad_(true);
  };
  at::Tensor transposed = make({6, 5}, 0.7).detach().t().contiguous().t();
  return {{"first.weight", make({6, 3}, 0.3)},
          {"first.bias", make({6}, 0.9)},
          {"second.weight", transposed.t().detach().requires_grad_(true)},  // [5, 6], column by column
          {"scale", make({1}, 0.0).detach().add_(1.5).requires_grad_(true)},
          {"unused", make({7}, 0.2)}};
}

// The loss over a rank's data.
at::Tensor loss_of_params(const std::vector<at::Tensor>& params, int rank) {
  const at::ScalarType dtype = params[0].scalar_type();
  const at::Tensor input = at::arange(12, at::kDouble).add(rank).mul(0.17).cos().reshape({4, 3}).to(dtype);
  const at::Tensor hidden = at::tanh(at::matmul(input, params[0].t()) + params[1]);
  return (at::matmul(hidden, params[2].t()) * params[3]).pow(2).sum();
}

std::vector<at::Tensor> tensors_of(const std::vector<NamedParameter>& named) {
  std::vector<at::Tensor> tensors;
  for (const NamedParameter& one : named) tensors.push_back(one.parameter);
  return tensors;
}

// One process with the data of all ranks, which averages the losses.
void backward_of_params(const std::vector<at::Tensor>& params, int ranks) {
  for (int rank = 0; rank < ranks; ++rank) loss_of_params(params, rank).div(ranks).backward();
}

// Forward and backward of a rank. The parameters are freed between the two if the strategy requires it.
double backward_of_rank(FlatParamHandle& handle, int rank, bool reduces = true) {
  handle.write_back_params();
  handle.unshard();
  const at::Tensor loss = loss_of_params(handle.params(), rank);
  handle.reshard(reshards_after_forward(handle.options().strategy));
  handle.prepare_gradient_for_backward();
  handle.unshard();
  loss.backward();
  for (std::size_t i = 0; i < handle.params().size(); ++i) handle.take_gradient(i);
  handle.reshard();
  if (reduces) {
    handle.start_reduce_gradient();
    handle.finish_reduce_gradient();
  }
  handle.prepare_gradient_for_optim();
  return loss.item<double>();
}

// The tensors that the optimizer works on.
std::vector<at::Tensor> optimized(const FlatParamHandle& handle) {
  return handle.options().use_orig_params ? handle.params() : std::vector<at::Tensor>{handle.flat_param()};
}

void zero_grad(const std::vector<at::Tensor>& params) {
  for (const at::Tensor& param : params) param.mutable_grad().reset();
}

// The step is small enough for the loss to decrease. If parameters diverged, so would differences in rounding.
void sgd_step(const std::vector<at::Tensor>& params) {
  const c10::NoGradGuard no_grad;
  for (const at::Tensor& param : params) {
    if (param.grad().defined()) param.detach().sub_(param.grad(), 0.002);
  }
}

// Returns this rank's shard of the full `tensors`, one-dimensional.
at::Tensor shard_of(const FlatParamHandle& handle, const std::vector<at::Tensor>& tensors, int rank) {
  at::Tensor shard = at::zeros({handle.layout().sharded_numel()}, tensors[0].options().requires_grad(false));
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const auto info = handle.layout().shard_param_info(rank, i);
    if (!info) continue;
    const at::Tensor flat = tensors[i].detach().as_strided({tensors[i].numel()}, {1});
    shard.narrow(0, info->offset_in_shard, info->numel_in_shard)
        .copy_(flat.narrow(0, info->intra_param_start_idx, info->numel_in_shard));
  }
  return shard;
}

bool is_freed(const at::Tensor& unsharded_view) { return unsharded_view.storage().nbytes() == 0; }

class FlatParamHandleTest : public ::testing::TestWithParam<Case> {
 protected:
  int world() const { return std::get<0>(GetParam()); }
  FlatParamOptions options() const {
    FlatParamOptions options;
    options.use_orig_params = std::get<1>(GetParam());
    options.strategy = std::get<2>(GetParam());
    return options;
  }
  int shard_rank(const ProcessGroup& group) const { return is_sharded(options().strategy) ? group.rank() : 0; }
};

INSTANTIATE_TEST_SUITE_P(Worlds, FlatParamHandleTest, every_case(), name_of_case);

TEST_P(FlatParamHandleTest, ParametersKeepTheirIdentityAndComeBackWhole) {
  run_local(world(), [&](const ProcessGroup& group) {
    const std::vector<at::Tensor> expected = tensors_of(make_params());
    const std::vector<NamedParameter> named = make_params();
    FlatParamHandle handle(named, group, options());
    EXPECT_TRUE(at::equal(handle.flat_param().detach(), shard_of(handle, expected, shard_rank(group))));
    for (int times = 0; times < 2; ++times) {
      for (std::size_t i = 0; i < expected.size(); ++i) {
        const at::Tensor& param = named[i].parameter;
        EXPECT_TRUE(param.is_same(handle.params()[i]));
        EXPECT_TRUE(param.is_leaf() && param.requires_grad());
        if (!is_sharded(options().strategy)) {
          EXPECT_TRUE(at::equal(param, expected[i]));
          continue;
        }
        const auto info = handle.layout().shard_param_info(group.rank(), i);
        EXPECT_EQ(param.dim(), 1);
        EXPECT_EQ(param.numel(), options().use_orig_params && info ? info->numel_in_shard : 0);
      }
      handle.unshard();
      const at::Tensor view = handle.params()[0].detach();
      EXPECT_TRUE(handle.is_unsharded());
      for (std::size_t i = 0; i < expected.size(); ++i) {
        EXPECT_TRUE(at::equal(named[i].parameter, expected[i]));
        EXPECT_EQ(named[i].parameter.strides(), expected[i].strides());
      }
      handle.reshard();
      EXPECT_EQ(is_freed(view), is_sharded(options().strategy));
    }
  });
}

TEST_P(FlatParamHandleTest, GradientsAreTheAverageOverTheRanks) {
  run_local(world(), [&](const ProcessGroup& group) {
    const std::vector<at::Tensor> full = tensors_of(make_params());
    backward_of_params(full, world());
    FlatParamHandle handle(make_params(), group, options());
    backward_of_rank(handle, group.rank());
    std::vector<at::Tensor> expected;
    for (const at::Tensor& param : full) {
      expected.push_back(param.grad().defined() ? param.grad() : at::zeros_like(param));
    }
    for (std::size_t i = 0; i < expected.size(); ++i) {
      expected[i] = at::empty_strided(full[i].sizes(), full[i].strides(), full[i].options().requires_grad(false))
                        .copy_(expected[i]);
    }
    EXPECT_TRUE(at::allclose(handle.sharded_gradient(), shard_of(handle, expected, shard_rank(group)), 1e-12, 1e-14));
    for (const at::Tensor& param : optimized(handle)) {
      EXPECT_EQ(param.grad().sizes(), param.sizes());
      EXPECT_TRUE(param.grad().is_alias_of(handle.sharded_gradient()));
    }
  });
}

TEST_P(FlatParamHandleTest, TrainsAsOneProcessDoes) {
  run_local(world(), [&](const ProcessGroup& group) {
    const std::vector<at::Tensor> full = tensors_of(make_params());
    FlatParamHandle handle(make_params(), group, options());
    for (int step = 0; step < 8; ++step) {
      zero_grad(full);
      const double expected = loss_of_params(full, group.rank()).item<double>();
      backward_of_params(full, world());
      zero_grad(optimized(handle));
      EXPECT_NEAR(backward_of_rank(handle, group.rank()), expected, 1e-12 * std::abs(expected));
      sgd_step(full);
      sgd_step(optimized(handle));
    }
    handle.unshard();
    for (std::size_t i = 0; i < full.size(); ++i) {
      EXPECT_TRUE(at::allclose(handle.params()[i], full[i], 1e-12, 1e-14));
    }
  });
}

TEST_P(FlatParamHandleTest, GradientsAddUpWithAndWithoutCommunication) {
  run_local(world(), [&](const ProcessGroup& group) {
    FlatParamHandle once(make_params(), group, options()), handle(make_params(), group, options());
    backward_of_rank(once, group.rank());
    backward_of_rank(handle, group.rank(), false);
    EXPECT_TRUE(handle.has_unsharded_gradient());
    backward_of_rank(handle, group.rank(), false);
    backward_of_rank(handle, group.rank());  // reduces the gradients of all three
    EXPECT_FALSE(handle.has_unsharded_gradient());
    backward_of_rank(handle, group.rank());  // accumulates
    EXPECT_TRUE(at::allclose(handle.sharded_gradient(), once.sharded_gradient().mul(4), 1e-12, 1e-14));
  });
}

TEST_P(FlatParamHandleTest, WhatWasDroppedIsNotAddedTo) {
  run_local(world(), [&](const ProcessGroup& group) {
    FlatParamHandle once(make_params(), group, options()), handle(make_params(), group, options());
    backward_of_rank(once, group.rank());
    for (const bool reduces : {true, false}) {
      backward_of_rank(handle, group.rank(), reduces);
      zero_grad(optimized(handle));
      backward_of_rank(handle, group.rank());
      EXPECT_TRUE(at::equal(handle.sharded_gradient(), once.sharded_gradient()));
      zero_grad(optimized(handle));
    }
  });
}

TEST_P(FlatParamHandleTest, LowPrecisionComputesAndReducesAndTheShardStaysWhole) {
  run_local(world(), [&](const ProcessGroup& group) {
    for (const bool keeps : {false, true}) {
      FlatParamOptions low = options();
      low.mixed_precision.param_dtype = at::kBFloat16;
      low.mixed_precision.keep_low_precision_grads = keeps;
      const std::vector<at::Tensor> full = tensors_of(make_params(at::kFloat));
      FlatParamHandle handle(make_params(at::kFloat), group, low);
      handle.unshard();
      for (std::size_t i = 0; i < full.size(); ++i) {
        EXPECT_TRUE(at::equal(handle.params()[i], full[i].to(at::kBFloat16)));
      }
      handle.reshard();
      EXPECT_EQ(handle.flat_param().scalar_type(), at::kFloat);
      EXPECT_EQ(handle.params()[0].scalar_type(), at::kFloat);
      const at::ScalarType grad_dtype = keeps ? at::kBFloat16 : at::kFloat;
      for (int times = 0; times < 2; ++times) {
        backward_of_rank(handle, group.rank());
        EXPECT_EQ(handle.sharded_gradient().scalar_type(), grad_dtype);
      }
      backward_of_params(full, world());
      backward_of_params(full, world());
      for (std::size_t i = 0; i < full.size(); ++i) {
        if (!full[i].grad().defined()) full[i].mutable_grad() = at::zeros_like(full[i]);
      }
      std::vector<at::Tensor> expected;
      for (const at::Tensor& param : full) {
        expected.push_back(at::empty_strided(param.sizes(), param.strides()).copy_(param.grad()));
      }
      EXPECT_TRUE(at::allclose(handle.sharded_gradient().to(at::kFloat), shard_of(handle, expected, shard_rank(group)),
                               0.05, 0.1));
    }
  });
}

TEST_P(FlatParamHandleTest, WhatIsPutInASharedParametersPlaceIsKept) {
  run_local(world(), [&](const ProcessGroup& group) {
    FlatParamHandle handle(make_params(), group, options());
    at::Tensor param = handle.params()[0];
    EXPECT_FALSE(handle.write_back_params());
    if (!options().use_orig_params) return;  // sharded parameters are empty
    const bool has_part = param.numel() != 0;
    param.set_data(at::full_like(param, 3.0));
    EXPECT_EQ(handle.write_back_params(), has_part);
    EXPECT_FALSE(handle.write_back_params());
    handle.unshard();
    EXPECT_TRUE(at::equal(param, at::full({6, 3}, 3.0, at::kDouble)));
    handle.reshard();
    if (has_part) {
      param.set_data(at::ones({100}, at::kDouble));
      EXPECT_ERROR(handle.write_back_params(), ErrorCode::invalid_argument,
                   "the data assigned to sharded parameter 'first.weight' has 100 elements, expected this rank's");
    }
  });
}

TEST(FlatParamHandleOfSomeTest, ParametersThatNeedNoGradientGetNone) {
  run_local(2, [&](const ProcessGroup& group) {
    std::vector<NamedParameter> named = make_params();
    named[1].parameter.set_requires_grad(false);
    FlatParamHandle handle(named, group, {});
    backward_of_rank(handle, group.rank());
    EXPECT_FALSE(named[1].parameter.grad().defined());
  });
}

TEST(FlatParamHandleOfSomeTest, AParameterOfTwoNamesIsThereOnce) {
  run_local(2, [&](const ProcessGroup& group) {
    std::vector<NamedParameter> named = make_params();
    named.push_back({"tied", named[0].parameter});
    FlatParamHandle handle(named, group, {});
    EXPECT_EQ(handle.params().size(), 5u);
    EXPECT_THAT(handle.layout().shared_params(), ElementsAre(SharedParamInfo{"tied", 0}));
  });
}

// Two groups of two ranks: sharded within each, averaged over all four.
TEST(FlatParamHandleOfSomeTest, HybridShardingAveragesOverAllGroups) {
  run_local(4, [&](const ProcessGroup& group) {
    std::optional<ProcessGroup> shards, replicas;
    for (const int first : {0, 2}) {
      const int ranks[] = {first, first + 1};
      if (auto made = group.subgroup(ranks)) shards = made;
    }
    for (const int first : {0, 1}) {
      const int ranks[] = {first, first + 2};
      if (auto made = group.subgroup(ranks)) replicas = made;
    }
    FlatParamOptions options;
    options.strategy = ShardingStrategy::hybrid_shard;
    options.replicas = replicas;
    FlatParamHandle hybrid(make_params(), *shards, options), sharded(make_params(), group, {});
    backward_of_rank(hybrid, group.rank());
    backward_of_rank(sharded, group.rank());
    const auto gathered = [](const FlatParamHandle& handle) {
      at::Tensor all = at::empty({handle.layout().padded_unsharded_numel()}, at::kDouble);
      handle.group().all_gather_into(all, handle.sharded_gradient());
      const ParamInfo& last = handle.layout().params().back();
      return all.narrow(0, 0, last.offset + last.numel);
    };
    EXPECT_TRUE(at::allclose(gathered(hybrid), gathered(sharded), 1e-12, 1e-14));
  });
}

TEST(FlatParamHandleOfSomeTest, Refusals) {
  run_local(2, [&](const ProcessGroup& group) {
    const auto refusal = [&](FunctionRef<void(std::vector<NamedParameter>&, FlatParamOptions&)> change,
                             const std::string& why) {
      std::vector<NamedParameter> named = make_params();
      FlatParamOptions options;
      change(named, options);
      EXPECT_ERROR(FlatParamHandle(named, group, options), ErrorCode::invalid_argument, "make a flat parameter", why);
    };
    refusal([](auto& named, auto&) { named.clear(); }, "no parameters");
    refusal([](auto& named, auto&) { named[1].parameter = at::ones({3}, at::kLong); },
            "parameter 'first.bias' has dtype Long, expected a floating-point dtype");
    refusal([](auto& named, auto&) { named[2].parameter = at::ones({3}); },
            "parameter 'second.weight' has dtype Float, expected Double as 'first.weight'");
    refusal([](auto& named, auto&) { named[2].parameter = named[2].parameter * 2; }, "expected a leaf");
    refusal([](auto& named, auto&) { named[3].parameter = at::Tensor(); }, "parameter 'scale' is undefined");
    refusal(
        [](auto& named, auto& options) {
          options.use_orig_params = false;
          named[1].parameter.set_requires_grad(false);
        },
        "has requires_grad false, expected true as 'first.weight'");
    refusal([](auto&, auto& options) { options.strategy = ShardingStrategy::hybrid_shard; },
            "replicas are missing, expected a group");
    refusal([](auto& named, auto&) { named[4].fqn = "scale"; }, "duplicate name 'scale'");
    refusal(
        [&](auto& named, auto&) {
          if (group.rank() == 1) named.pop_back();
        },
        "rank 0 has parameter 'unused' [7] [1] that requires grad and rank 1 has no such argument");
  });
}

// Flattens parameters in reverse order, like an extension that stores them in another form.
struct Reversed : FlatParamExtensions {
  at::Tensor pre_flatten_transform(const std::string& fqn, const at::Tensor& parameter) override {
    return fqn == "first.weight" ? parameter.t().contiguous() : parameter;
  }
  at::Tensor post_unflatten_transform(const std::string& fqn, const at::Tensor& view) override {
    return fqn == "first.weight" ? view.t() : view;
  }
};

TEST(FlatParamHandleOfSomeTest, ParametersMayBeFlattenedInAnotherForm) {
  run_local(2, [&](const ProcessGroup& group) {
    FlatParamOptions options;
    options.extensions = std::make_shared<Reversed>();
    FlatParamHandle plain(make_params(), group, {}), handle(make_params(), group, options);
    EXPECT_EQ(handle.layout().params()[0].shape, (std::vector<std::int64_t>{3, 6}));
    EXPECT_EQ(backward_of_rank(handle, group.rank()), backward_of_rank(plain, group.rank()));
    for (FlatParamHandle* each : {&plain, &handle}) {
      each->unshard();
      each->unshard_grad();
    }
    EXPECT_TRUE(at::equal(handle.params()[0], plain.params()[0]));
    EXPECT_TRUE(at::equal(handle.params()[0].grad(), plain.params()[0].grad()));
  });
}

TEST(FlatParamHandleOfSomeTest, FlattenedTensorsComeBack) {
  run_local(2, [&](const ProcessGroup& group) {
    FlatParamHandle handle(make_params(), group, {});
    std::vector<at::Tensor> tensors;
    for (const NamedParameter& named : make_params()) tensors.push_back(named.parameter.detach() + 1);
    const at::Tensor flat = handle.flatten_tensors(tensors);
    EXPECT_EQ(flat.numel(), handle.layout().padded_unsharded_numel());
    const std::vector<at::Tensor> back = handle.unflatten_as(flat);
    for (std::size_t i = 0; i < back.size(); ++i) EXPECT_TRUE(at::equal(back[i], tensors[i]));
    tensors[1] = at::ones({2});
    EXPECT_ERROR(handle.flatten_tensors(tensors), ErrorCode::invalid_argument,
                 "'first.bias' has shape [2], expected [6]");
    EXPECT_ERROR(handle.flatten_tensors({}), ErrorCode::invalid_argument, "0 tensors given, expected 5");
  });
}

TEST(FlatParamHandleOfSomeTest, AGradientThatNeedsOneIsRefused) {
  FlatParamHandle handle(make_params(), ProcessGroup(), {});
  handle.unshard();
  handle.params()[0].mutable_grad() = at::ones({6, 3}, at::kDouble).requires_grad_(true);
  EXPECT_ERROR(handle.take_gradient(0), ErrorCode::unsupported, "the gradient of 'first.weight' requires a gradient");
}

}  // namespace
}  // namespace tessera::fsdp
