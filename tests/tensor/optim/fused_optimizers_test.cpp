#include "tessera/tensor/optim/fused_optimizers.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <limits>
#include <memory>
#include <vector>

#include "support/error_matchers.h"

namespace tessera {
namespace {

using torch::optim::Adam;
using torch::optim::AdamOptions;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;

struct AdamCase {
  const char* name;
  bool amsgrad;
  double weight_decay;
  at::ScalarType dtype;
};

const std::vector<AdamCase> kAdamCases = {{"Plain", false, 0, at::kFloat},
                                          {"Decayed", false, 0.1, at::kFloat},
                                          {"Amsgrad", true, 0.05, at::kFloat},
                                          {"OfDouble", true, 0.05, at::kDouble},
                                          {"OfBFloat16", false, 0.05, at::kBFloat16}};

std::vector<at::Tensor> parameters_of(at::ScalarType dtype) {
  std::vector<at::Tensor> parameters;
  for (const std::vector<std::int64_t>& sizes : {std::vector<std::int64_t>{}, {7}, {300, 130}, {2, 3, 5}}) {
    const at::Tensor counted = at::arange(c10::multiply_integers(sizes), at::kDouble).view(sizes);
    parameters.push_back(at::sin(counted).to(dtype));
  }
  parameters.push_back(at::sin(at::arange(12, at::kDouble)).view({3, 4}).to(dtype).t());              // not contiguous
  parameters.push_back(at::sin(at::arange(24, at::kDouble)).view({4, 6}).to(dtype).narrow(1, 1, 3));  // not dense
  const double infinite = std::numeric_limits<double>::infinity();
  parameters.push_back(at::tensor({1.0, infinite, -infinite}, at::kDouble).to(dtype));  // as a mask
  for (at::Tensor& parameter : parameters) parameter = parameter.detach().set_requires_grad(true);
  return parameters;
}

void step(torch::optim::Optimizer& optimizer, const std::vector<at::Tensor>& parameters, int number) {
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (i == 1 && number == 0) continue;  // one parameter begins a step later
    const at::Tensor& of = parameters[i];
    of.mutable_grad() =
        at::cos(at::arange(of.numel(), at::kDouble) * (number + 1)).view(of.sizes()).to(of.scalar_type());
  }
  optimizer.step();
}

class FusedOptimizersTest : public ::testing::TestWithParam<AdamCase> {
 protected:
  template <typename Options>
  Options options() const {
    Options made(0.05);
    made.betas({0.8, 0.95}).weight_decay(GetParam().weight_decay).amsgrad(GetParam().amsgrad);
    return made;
  }
  // Steps with both, and with each from the other's state.
  template <typename Fused, typename Plain, typename Options, typename State>
  void compare() const {
    const std::vector<at::Tensor> ours = parameters_of(GetParam().dtype), theirs = parameters_of(GetParam().dtype);
    Fused fused(ours, options<Options>());
    Plain plain(theirs, options<Options>());
    const double tolerance = GetParam().dtype == at::kBFloat16 ? 3e-2 : 1e-5;
    for (int number = 0; number < 6; ++number) {
      step(fused, ours, number);
      step(plain, theirs, number);
      ASSERT_EQ(fused.state().size(), plain.state().size());
      for (std::size_t i = 0; i < ours.size(); ++i)
        ASSERT_TRUE(at::allclose(ours[i], theirs[i], tolerance, tolerance, /*equal_nan=*/true))
            << i << " in step " << number;
      for (auto& [key, state] : fused.state()) {
        ASSERT_NE(dynamic_cast<State*>(state.get()), nullptr);
        EXPECT_EQ(static_cast<State&>(*state).max_exp_avg_sq().defined(), GetParam().amsgrad);
      }
    }
  }
};
INSTANTIATE_TEST_SUITE_P(, FusedOptimizersTest, ::testing::ValuesIn(kAdamCases),
                         [](const auto& test) { return test.param.name; });

TEST_P(FusedOptimizersTest, AdamIsThatOfLibTorch) {
  compare<FusedAdam, Adam, AdamOptions, torch::optim::AdamParamState>();
}

TEST_P(FusedOptimizersTest, AdamWIsThatOfLibTorch) {
  compare<FusedAdamW, AdamW, AdamWOptions, torch::optim::AdamWParamState>();
}

TEST(FusedOptimizersRefusalTest, ASparseGradientIsRefusedBeforeAnythingChanges) {
  const std::vector<at::Tensor> parameters = {at::ones({3}).set_requires_grad(true),
                                              at::ones({3}).set_requires_grad(true)};
  parameters[0].mutable_grad() = at::ones({3});
  parameters[1].mutable_grad() = at::ones({3}).to_sparse();
  FusedAdamW optimizer(parameters);
  EXPECT_ERROR(optimizer.step(), ErrorCode::unsupported, "FusedAdamW: a gradient with layout Sparse",
               "expected a dense one");
  EXPECT_TRUE(at::equal(parameters[0], at::ones({3})));
  EXPECT_TRUE(optimizer.state().empty());
}

TEST(FusedOptimizersRefusalTest, AmsgradNeedsTheStateOfATrainingWithIt) {
  const std::vector<at::Tensor> parameters = parameters_of(at::kFloat);
  FusedAdam optimizer(parameters, AdamOptions(0.05));
  step(optimizer, parameters, 1);
  const at::Tensor before = parameters[2].detach().clone();
  static_cast<AdamOptions&>(optimizer.param_groups()[0].options()).amsgrad(true);
  EXPECT_ERROR(step(optimizer, parameters, 2), ErrorCode::invalid_argument,
               "FusedAdam: the state of a parameter has no max_exp_avg_sq",
               "expected the state of a training with amsgrad");
  EXPECT_TRUE(at::equal(parameters[2], before));
  optimizer.state().clear();
  step(optimizer, parameters, 2);
  EXPECT_FALSE(at::equal(parameters[2], before));
}

TEST(FusedOptimizersRefusalTest, AClosureComputesTheLossWithGradients) {
  const at::Tensor parameter = at::ones({3}).set_requires_grad(true);
  FusedAdam optimizer({parameter}, AdamOptions(0.5));
  const at::Tensor loss = optimizer.step([&] {
    optimizer.zero_grad();
    const at::Tensor value = parameter.square().sum();
    value.backward();
    return value;
  });
  EXPECT_EQ(loss.item<float>(), 3);
  EXPECT_TRUE(at::allclose(parameter, at::full({3}, 0.5)));
}

}  // namespace
}  // namespace tessera
