// Gradient scaling: equality with PyTorch, agreement between ranks, and the order of calls.

#include "tessera/fsdp/sharded_grad_scaler.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <gtest/gtest.h>
#include <torch/optim/sgd.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>

#include "support/error_matchers.h"
#include "support/paths.h"
#include "tessera/comm/local_ranks.h"

namespace tessera::fsdp {
namespace {

using nlohmann::json;

constexpr double kInf = std::numeric_limits<double>::infinity();

// Its contents are described in tests/golden/fsdp/grad_scaler.py.
json golden(const char* part) {
  std::ifstream in(std::filesystem::path(tessera::testing::source_dir()) / "tests/golden/fsdp/grad_scaler.json");
  return json::parse(in).at(part);
}

double number(const json& text) { return std::strtod(text.get<std::string>().c_str(), nullptr); }

Value value(const json& item) { return item.is_string() ? Value(number(item)) : Value(item.get<std::int64_t>()); }

at::Tensor tensor(const json& texts, at::ScalarType dtype) {
  std::vector<double> values;
  for (const json& text : texts) values.push_back(number(text));
  return at::tensor(values, at::kDouble).to(dtype);
}

torch::optim::SGD sgd(std::vector<at::Tensor> params) {
  return torch::optim::SGD(std::move(params), torch::optim::SGDOptions(0.5));
}

at::Tensor parameter(at::IntArrayRef shape, at::ScalarType dtype = at::kFloat) {
  return at::ones(shape, dtype).requires_grad_(true);
}

void set_grad(const at::Tensor& param, const at::Tensor& grad) { param.mutable_grad() = grad; }
void set_grad(const at::Tensor& param, double value) { set_grad(param, at::full_like(param.detach(), value)); }

GradScalerOptions beginning_with(double scale) {
  GradScalerOptions options;
  options.init_scale = scale;
  return options;
}

TEST(ShardedGradScalerTest, ScalesAsPyTorchDoes) {
  for (const json& sequence : golden("sequences")) {
    GradScalerOptions options;
    options.init_scale = number(sequence.at("init_scale"));
    options.growth_factor = number(sequence.at("growth_factor"));
    options.backoff_factor = number(sequence.at("backoff_factor"));
    options.growth_interval = sequence.at("growth_interval");
    ShardedGradScaler scaler({}, options);
    const at::Tensor param = parameter({2});
    torch::optim::SGD optimizer = sgd({param});
    for (const json& step : sequence.at("steps")) {
      scaler.scale(at::ones({}));
      set_grad(param, step.at("found_inf").get<bool>() ? kInf : 1.0);
      EXPECT_EQ(scaler.step(optimizer), step.at("stepped").get<bool>());
      if (const json& interval = step.at("new_interval"); !interval.is_null()) scaler.set_growth_interval(interval);
      const json& new_scale = step.at("new_scale");
      scaler.update(new_scale.is_null() ? std::nullopt : std::optional(number(new_scale)));
      StateDict expected;
      for (const auto& [key, item] : step.at("state").items()) expected.insert_or_assign(key, value(item));
      ASSERT_EQ(scaler.state_dict(), expected);
    }
  }
}

TEST(ShardedGradScalerTest, UnscalesAsPyTorchDoes) {
  const std::map<std::string, at::ScalarType> dtypes{
      {"float32", at::kFloat}, {"float64", at::kDouble}, {"float16", at::kHalf}, {"bfloat16", at::kBFloat16}};
  for (const json& item : golden("unscaled")) {
    const at::ScalarType dtype = dtypes.at(item.at("dtype"));
    ShardedGradScaler scaler({}, beginning_with(number(item.at("scale"))));
    const at::Tensor grad = tensor(item.at("gradient"), dtype), expected = tensor(item.at("result"), dtype);
    const at::Tensor param = parameter({grad.numel()}, dtype);
    torch::optim::SGD optimizer = sgd({param});
    set_grad(param, grad);
    scaler.scale(at::ones({}));
    scaler.unscale_(optimizer);
    EXPECT_TRUE(same_bits(grad, expected)) << item << "\n" << grad;
    EXPECT_EQ(scaler.step(optimizer), !item.at("found_inf").get<bool>()) << item;
  }
}

TEST(ShardedGradScalerTest, NoRankStepsWhereOneFoundInfOrNan) {
  run_local(3, [](const ProcessGroup& group) {
    ShardedGradScaler scaler(group, beginning_with(4.0));
    const at::Tensor param = parameter({3});
    torch::optim::SGD optimizer = sgd({param});
    const auto iterate = [&](double grad_of_rank_1) {
      scaler.scale(at::ones({}));
      set_grad(param, group.rank() == 1 ? grad_of_rank_1 : 4.0);
      const bool stepped = scaler.step(optimizer);
      scaler.update();
      return stepped;
    };
    EXPECT_FALSE(iterate(kInf));
    EXPECT_FALSE(iterate(-kInf));
    EXPECT_FALSE(iterate(std::nan("")));
    EXPECT_TRUE(at::equal(param, at::ones({3})));
    EXPECT_EQ(scaler.get_scale(), 0.5);
    EXPECT_TRUE(iterate(4.0));
    EXPECT_TRUE(at::equal(param, at::full({3}, 1.0 - 0.5 * 4.0 / 0.5)));
  });
}

TEST(ShardedGradScalerTest, ARankMayHaveNoGradients) {
  run_local(3, [](const ProcessGroup& group) {
    ShardedGradScaler scaler(group, beginning_with(4.0));
    const at::Tensor full = parameter({group.rank() == 1 ? 3 : 0}), none = parameter({2});
    torch::optim::SGD optimizer = sgd({full, none});
    set_grad(full, kInf);
    scaler.scale(at::ones({}));
    EXPECT_FALSE(scaler.step(optimizer));
    scaler.update();
    set_grad(full, 4.0);
    scaler.scale(at::ones({}));
    EXPECT_TRUE(scaler.step(optimizer));
    EXPECT_FALSE(none.grad().defined());
  });
}

TEST(ShardedGradScalerTest, WithoutOverflowTrainingIsAsWithoutScaling) {
  const at::Tensor scaled = parameter({5, 3}, at::kDouble), plain = parameter({5, 3}, at::kDouble);
  const at::Tensor input = at::arange(15, at::kDouble).sin().reshape({3, 5});
  torch::optim::SGD scaled_optimizer = sgd({scaled}), plain_optimizer = sgd({plain});
  GradScalerOptions options;
  options.growth_interval = 2;
  ShardedGradScaler scaler({}, options);
  for (int step = 0; step < 6; ++step) {
    scaled_optimizer.zero_grad();
    plain_optimizer.zero_grad();
    scaler.scale(at::mm(input, scaled).square().mean()).backward();
    at::mm(input, plain).square().mean().backward();
    EXPECT_TRUE(scaler.step(scaled_optimizer));
    scaler.update();
    plain_optimizer.step();
    ASSERT_TRUE(at::equal(scaled, plain));  // the scale is a power of two
  }
  EXPECT_EQ(scaler.get_scale(), 65536.0 * 8);
}

TEST(ShardedGradScalerTest, LossesKeepTheirDtypeAndTheirGraph) {
  ShardedGradScaler scaler({}, beginning_with(4.0));
  for (const at::ScalarType dtype : {at::kHalf, at::kBFloat16, at::kFloat, at::kDouble}) {
    const at::Tensor loss = at::full({}, 3.0, dtype).requires_grad_(true);
    const at::Tensor scaled = scaler.scale(loss);
    EXPECT_EQ(scaled.scalar_type(), dtype);
    EXPECT_EQ(scaled.item<double>(), 12.0);
    scaled.backward();
    EXPECT_EQ(loss.grad().item<double>(), 4.0);
  }
  const std::vector<at::Tensor> both = scaler.scale({at::full({}, 3.0), at::full({2}, 5.0)});
  EXPECT_TRUE(at::equal(both.at(0), at::full({}, 12.0)) && at::equal(both.at(1), at::full({2}, 20.0)));
}

TEST(ShardedGradScalerTest, GradientsMayLieInMemoryAsTheyLike) {
  ShardedGradScaler scaler({}, beginning_with(4.0));
  scaler.scale(at::ones({}));
  const at::Tensor transposed = parameter({2, 3}), apart = parameter({2, 3}), sparse = parameter({4}),
                   big = parameter({100000});
  torch::optim::SGD optimizer = sgd({transposed, apart, sparse, big});
  const at::Tensor memory = at::full({2, 6}, 8.0);
  set_grad(transposed, at::arange(6, at::kFloat).reshape({3, 2}).t());
  set_grad(apart, memory.slice(1, 0, 6, 2));
  set_grad(sparse, at::sparse_coo_tensor(at::tensor({1, 1}, at::kLong).unsqueeze(0), at::full({2}, 8.0), {4}));
  set_grad(big, 8.0);
  scaler.unscale_(optimizer);
  EXPECT_TRUE(at::equal(transposed.grad(), at::arange(6, at::kFloat).div(4).reshape({3, 2}).t()));
  EXPECT_TRUE(at::equal(apart.grad(), at::full({2, 3}, 2.0)));
  EXPECT_TRUE(at::equal(memory.slice(1, 1, 6, 2), at::full({2, 3}, 8.0)));
  EXPECT_TRUE(at::equal(sparse.grad().to_dense(), at::tensor({0.0, 4.0, 0.0, 0.0}, at::kFloat)));
  EXPECT_TRUE(at::equal(big.grad(), at::full({100000}, 2.0)));
}

TEST(ShardedGradScalerTest, AnInfIsFoundWhereverItIs) {
  for (const std::int64_t place : {0, 5, 40000, 99999}) {
    ShardedGradScaler scaler;
    const at::Tensor first = parameter({3}), big = parameter({100000}), last = parameter({3});
    torch::optim::SGD optimizer = sgd({first, big, last});
    for (const at::Tensor& param : {first, big, last}) set_grad(param, 1.0);
    big.grad()[place] = -kInf;
    scaler.scale(at::ones({}));
    EXPECT_FALSE(scaler.step(optimizer)) << place;
  }
}

// Repeated indices count with their sum.
TEST(ShardedGradScalerTest, SparseHalfGradientsThatOverflowTogetherAreFound) {
  const at::Tensor param = parameter({4}, at::kHalf);
  torch::optim::SGD optimizer = sgd({param});
  const at::Tensor twice = at::tensor({1, 1}, at::kLong).unsqueeze(0);
  for (const double each : {60000.0, 8.0}) {
    ShardedGradScaler scaler({}, beginning_with(4.0));
    set_grad(param, at::sparse_coo_tensor(twice, at::full({2}, each, at::kHalf), {4}));
    scaler.scale(at::ones({}));
    scaler.unscale_(optimizer);
    const at::Tensor grad = param.grad().to(at::kFloat).to_dense();
    EXPECT_TRUE(at::equal(grad, at::tensor({0.0, each == 8.0 ? 4.0 : kInf, 0.0, 0.0}, at::kFloat)));
    EXPECT_EQ(scaler.step(optimizer), each == 8.0);
  }
}

TEST(ShardedGradScalerTest, EachOptimizerStepsByItsOwnAndTheyShareTheScale) {
  for (std::size_t bad = 0; bad < 3; ++bad) {
    ShardedGradScaler scaler({}, beginning_with(4.0));
    scaler.scale(at::ones({}));
    const std::vector<at::Tensor> params{parameter({2}), parameter({2}), parameter({2})};
    std::vector<torch::optim::SGD> optimizers;
    optimizers.reserve(params.size());
    for (std::size_t i = 0; i < params.size(); ++i) {
      set_grad(params[i], i == bad ? kInf : 4.0);
      optimizers.push_back(sgd({params[i]}));
      EXPECT_EQ(scaler.step(optimizers[i]), i != bad);
      EXPECT_TRUE(at::equal(params[i], at::full({2}, i == bad ? 1.0 : 0.5)));
    }
    scaler.update();
    EXPECT_EQ(scaler.get_scale(), 2.0);
  }
}

TEST(ShardedGradScalerTest, CallsComeInOrder) {
  ShardedGradScaler scaler({}, beginning_with(4.0));
  const at::Tensor param = parameter({2});
  torch::optim::SGD optimizer = sgd({param});
  const auto refused = [](auto&& call, const char* words) { EXPECT_ERROR(call(), ErrorCode::invalid_argument, words); };
  const auto unscale = [&] { scaler.unscale_(optimizer); };
  const auto step = [&] { scaler.step(optimizer); };
  const auto update = [&] { scaler.update(); };
  refused(unscale, "unscale_: there is no scale");
  refused(step, "step: there is no scale");
  refused(update, "update: there is no scale");
  scaler.scale(at::ones({}));
  refused(update, "no gradients were unscaled");
  for (int times = 0; times < 2; ++times) {
    set_grad(param, 4.0);
    unscale();
    refused(unscale, "unscale_() has been called for this optimizer, expected update() first");
    step();
    EXPECT_TRUE(at::equal(param.grad(), at::ones({2})));  // divided once
    refused(unscale, "unscale_: step() has been called for this optimizer");
    refused(step, "step: step() has been called for this optimizer");
    update();
    refused(update, "no gradients were unscaled");
  }
  const auto closure = [&] { scaler.step(optimizer, [] { return at::Tensor(); }); };
  EXPECT_ERROR(closure(), ErrorCode::unsupported, "a closure was given");
  refused([&] { scaler.update(0.0); }, "the new scale is 0");
  set_grad(param, at::ones({2}));
  scaler.update(16.0);
  EXPECT_EQ(scaler.get_scale(), 16.0);
}

TEST(ShardedGradScalerTest, GradientsOfOtherDtypesAreRefused) {
  ShardedGradScaler scaler;
  const at::Tensor param = at::ones({2}, at::kComplexFloat).requires_grad_(true);
  torch::optim::SGD optimizer = sgd({param});
  set_grad(param, 1.0);
  scaler.scale(at::ones({}));
  EXPECT_ERROR(
      scaler.unscale_(optimizer), ErrorCode::unsupported,
      "unscale_: the gradient of parameter 0 of group 0 has dtype ComplexFloat, expected a floating-point dtype");
  const at::Tensor first = parameter({2}), second = parameter({2});
  torch::optim::SGD several = sgd({first, second});
  several.add_param_group(torch::optim::OptimizerParamGroup(std::vector<at::Tensor>{parameter({1}), param}));
  EXPECT_ERROR(scaler.step(several), ErrorCode::unsupported,
               "step: the gradient of parameter 1 of group 1 has dtype ComplexFloat, expected a floating-point dtype");
}

TEST(ShardedGradScalerTest, StateComesBack) {
  GradScalerOptions options;
  options.init_scale = 0.1;
  ShardedGradScaler saved({}, options), loaded, running;
  const auto iterate = [](ShardedGradScaler& scaler) {
    const at::Tensor param = parameter({2});
    torch::optim::SGD optimizer = sgd({param});
    set_grad(param, 1.0);
    scaler.scale(at::ones({}));
    scaler.step(optimizer);
    scaler.update();
  };
  const StateDict fresh{{"scale", 0.1},
                        {"growth_factor", 2.0},
                        {"backoff_factor", 0.5},
                        {"growth_interval", 2000},
                        {"_growth_tracker", 0}};
  EXPECT_EQ(saved.state_dict(), fresh);
  iterate(saved);
  saved.set_growth_factor(3.0);
  saved.set_backoff_factor(0.25);
  saved.set_growth_interval(2);
  const StateDict state = saved.state_dict();
  EXPECT_EQ(state.at("_growth_tracker"), Value(1));
  EXPECT_EQ(state.at("scale"), Value(static_cast<double>(0.1f)));
  for (int times = 0; times < 2; ++times) iterate(running);
  for (ShardedGradScaler* scaler : {&loaded, &running}) {
    scaler->load_state_dict(state);
    EXPECT_EQ(scaler->state_dict(), state);
    EXPECT_EQ(scaler->get_growth_factor(), 3.0);
    EXPECT_EQ(scaler->get_backoff_factor(), 0.25);
    EXPECT_EQ(scaler->get_growth_interval(), 2);
    iterate(*scaler);
    EXPECT_EQ(scaler->get_scale(), static_cast<double>(0.1f * 3.0f));
  }
}

TEST(ShardedGradScalerTest, AStateThatIsNotWholeChangesNothing) {
  ShardedGradScaler scaler;
  const StateDict before = scaler.state_dict();
  StateDict without = before, wrong = before;
  without.insert_or_assign("scale", 3.0);
  without.erase("_growth_tracker");
  wrong.insert_or_assign("scale", 3.0);
  wrong.insert_or_assign("growth_interval", 2.5);
  EXPECT_ERROR(scaler.load_state_dict({}), ErrorCode::invalid_argument, "it is empty");
  EXPECT_ERROR(scaler.load_state_dict(without), ErrorCode::invalid_argument, "'_growth_tracker' is missing");
  EXPECT_ERROR(scaler.load_state_dict(wrong), ErrorCode::invalid_argument,
               "'growth_interval' has kind float, expected int");
  EXPECT_EQ(scaler.state_dict(), before);
}

TEST(ShardedGradScalerTest, OneThatIsNotEnabledDoesNothing) {
  GradScalerOptions options;
  options.enabled = false;
  ShardedGradScaler scaler({}, options);
  const at::Tensor param = parameter({2}), loss = at::ones({});
  torch::optim::SGD optimizer = sgd({param});
  set_grad(param, 1.0);
  EXPECT_TRUE(scaler.scale(loss).is_same(loss));
  scaler.unscale_(optimizer);
  scaler.unscale_(optimizer);
  EXPECT_TRUE(scaler.step(optimizer));
  EXPECT_TRUE(at::equal(param, at::full({2}, 0.5)));
  int calls = 0;
  EXPECT_TRUE(scaler.step(optimizer, [&] {
    ++calls;
    return at::ones({});
  }));
  EXPECT_EQ(calls, 1);
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), 1.0);
  EXPECT_FALSE(scaler.is_enabled());
  EXPECT_TRUE(scaler.state_dict().empty());
  scaler.load_state_dict({});
}

TEST(ShardedGradScalerTest, FactorsOutOfRangeAreRefused) {
  const auto refused = [](double scale, double growth, double backoff, const char* words) {
    GradScalerOptions options;
    options.init_scale = scale;
    options.growth_factor = growth;
    options.backoff_factor = backoff;
    EXPECT_ERROR(ShardedGradScaler({}, options), ErrorCode::invalid_argument, words);
  };
  refused(0.0, 2.0, 0.5, "scale gradients: init_scale is 0, expected a float32 above 0");
  refused(-1.0, 2.0, 0.5, "init_scale is -1");
  refused(1e39, 2.0, 0.5, "init_scale is 1e+39");
  refused(1e-46, 2.0, 0.5, "init_scale is 1e-46");
  refused(kInf, 2.0, 0.5, "init_scale is inf");
  refused(1.0, 1.0, 0.5, "growth_factor is 1, expected a finite number above 1");
  refused(1.0, kInf, 0.5, "growth_factor is inf, expected a finite number above 1");
  refused(1.0, 2.0, 1.0, "backoff_factor is 1, expected above 0 and below 1");
  refused(1.0, 2.0, 0.0, "backoff_factor is 0");
  refused(1.0, 2.0, -0.5, "backoff_factor is -0.5");
  refused(1.0, 2.0, std::nan(""), "backoff_factor is nan");
  GradScalerOptions options;
  options.growth_interval = 0;
  EXPECT_ERROR(ShardedGradScaler({}, options), ErrorCode::invalid_argument,
               "growth_interval is 0, expected at least 1");
}

TEST(ShardedGradScalerTest, NoFunctionSetsWhatIsOutOfRange) {
  ShardedGradScaler scaler;
  scaler.scale(at::ones({}));
  const StateDict before = scaler.state_dict();
  const auto refused = [&](auto&& call, const char* words) {
    EXPECT_ERROR(call(), ErrorCode::invalid_argument, words);
    EXPECT_EQ(scaler.state_dict(), before);
  };
  refused([&] { scaler.set_growth_factor(0.9); }, "set_growth_factor: growth_factor is 0.9, expected a finite number");
  refused([&] { scaler.set_backoff_factor(0.0); }, "set_backoff_factor: backoff_factor is 0, expected above 0 and");
  refused([&] { scaler.set_growth_interval(0); }, "set_growth_interval: growth_interval is 0, expected at least 1");
  refused([&] { scaler.update(kInf); }, "update: the new scale is inf, expected a float32 above 0");
  refused([&] { scaler.update(std::nan("")); }, "update: the new scale is nan");
  const auto loads = [&](const char* key, const Value& wrong) {
    return [&scaler, key, wrong] {
      StateDict state = scaler.state_dict();
      state.insert_or_assign(key, wrong);
      scaler.load_state_dict(state);
    };
  };
  refused(loads("scale", 0.0), "load a gradient scaler's state: scale is 0, expected a float32 above 0");
  refused(loads("scale", std::nan("")), "scale is nan");
  refused(loads("growth_factor", 0.5), "growth_factor is 0.5");
  refused(loads("backoff_factor", 2.0), "backoff_factor is 2");
  refused(loads("growth_interval", 0), "growth_interval is 0");
  refused(loads("_growth_tracker", -1), "_growth_tracker is -1, expected 0 to 2147483647");
  refused(loads("_growth_tracker", std::int64_t{1} << 31), "_growth_tracker is 2147483648");
  scaler.set_growth_factor(1.0);  // keeps the scale, as in PyTorch
  scaler.set_backoff_factor(1.0);
  scaler.load_state_dict(scaler.state_dict());
  EXPECT_EQ(scaler.get_growth_factor(), 1.0);
}

}  // namespace
}  // namespace tessera::fsdp
