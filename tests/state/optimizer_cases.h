#pragma once
// The model and the optimizers of tests/golden/state/generate.py, and comparison of states up to rounding.

#include <gtest/gtest.h>
#include <torch/nn.h>
#include <torch/optim.h>

#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "tessera/state/value.h"

namespace tessera::testing {

namespace nn = torch::nn;
namespace optim = torch::optim;
using OptimizerPtr = std::unique_ptr<optim::Optimizer>;

inline nn::Sequential make_model() { return nn::Sequential(nn::Linear(3, 2), nn::Tanh(), nn::Linear(2, 1)); }

inline at::Tensor loss_of(nn::Sequential& model) {
  return model->forward(torch::tensor({{1.0F, -2.0F, 0.5F}, {0.25F, 1.0F, -1.0F}})).pow(2).sum();
}

template <typename Optimizer, typename Options>
OptimizerPtr in_two_groups(const nn::Sequential& model, const Options& options) {
  std::vector<optim::OptimizerParamGroup> groups;
  groups.emplace_back(model->ptr(0)->parameters(), std::make_unique<Options>(options));
  groups.emplace_back(model->ptr(2)->parameters(), std::make_unique<Options>(Options(options).lr(0.02)));
  return std::make_unique<Optimizer>(groups, options);
}

inline OptimizerPtr make_optimizer(const std::string& name, const nn::Sequential& model) {
  using Betas = std::tuple<double, double>;
  if (name == "sgd") return in_two_groups<optim::SGD>(model, optim::SGDOptions(0.1));
  if (name == "sgd_momentum") {
    return in_two_groups<optim::SGD>(model, optim::SGDOptions(0.1).momentum(0.9).dampening(0.1).weight_decay(0.01));
  }
  if (name == "sgd_nesterov") {
    return in_two_groups<optim::SGD>(model, optim::SGDOptions(0.1).momentum(0.9).nesterov(true));
  }
  if (name == "adam") {
    return in_two_groups<optim::Adam>(model, optim::AdamOptions(0.01).betas(Betas(0.8, 0.99)).weight_decay(0.1));
  }
  if (name == "adam_amsgrad") {
    return in_two_groups<optim::Adam>(model, optim::AdamOptions(0.01).eps(1e-6).amsgrad(true));
  }
  if (name == "adamw") return in_two_groups<optim::AdamW>(model, optim::AdamWOptions(0.01));
  if (name == "adagrad") {
    return in_two_groups<optim::Adagrad>(model,
                                         optim::AdagradOptions(0.1).lr_decay(0.01).initial_accumulator_value(0.5));
  }
  if (name == "rmsprop") return in_two_groups<optim::RMSprop>(model, optim::RMSpropOptions(0.01));
  if (name == "rmsprop_centered") {
    return in_two_groups<optim::RMSprop>(model,
                                         optim::RMSpropOptions(0.01).momentum(0.9).centered(true).weight_decay(0.01));
  }
  return std::make_unique<optim::LBFGS>(model->parameters(), optim::LBFGSOptions(0.5).max_iter(3).history_size(4));
}

// Returns an optimizer of the same class with other options, so that every option must come from the loaded state.
inline OptimizerPtr make_other(const std::string& name, const nn::Sequential& model) {
  if (name.starts_with("sgd")) return in_two_groups<optim::SGD>(model, optim::SGDOptions(7));
  if (name.starts_with("adamw")) return in_two_groups<optim::AdamW>(model, optim::AdamWOptions(7));
  if (name.starts_with("adam")) return in_two_groups<optim::Adam>(model, optim::AdamOptions(7));
  if (name.starts_with("adagrad")) return in_two_groups<optim::Adagrad>(model, optim::AdagradOptions(7));
  if (name.starts_with("rmsprop")) return in_two_groups<optim::RMSprop>(model, optim::RMSpropOptions(7));
  return std::make_unique<optim::LBFGS>(model->parameters(), optim::LBFGSOptions(7));
}

inline void step(nn::Sequential& model, optim::Optimizer& optimizer) {
  const auto closure = [&] {
    optimizer.zero_grad();
    at::Tensor loss = loss_of(model);
    loss.backward();
    return loss;
  };
  if (dynamic_cast<optim::LBFGS*>(&optimizer)) {
    optimizer.step(closure);
  } else {
    closure();
    optimizer.step();
  }
}

// Returns whether the values are equal up to rounding. An int may match a float, and a float a scalar tensor; a bool
// matches only a bool.
inline ::testing::AssertionResult close(const Value& ours, const Value& theirs) {
  const auto differ = [&] { return ::testing::AssertionFailure() << ours << " and " << theirs; };
  const auto sequence = [](const Value& value) -> const ValueSequence* {
    if (const auto* list = value.get_if<List>()) return list;
    return value.get_if<Tuple>();
  };
  const auto as_tensor = [](const Value& value) {
    if (const auto* tensor = value.get_if<at::Tensor>()) return tensor->to(at::kDouble);
    return at::scalar_tensor(value.number(), at::kDouble);
  };
  if (ours.is<Dict>() && theirs.is<Dict>()) {
    for (const auto& [key, value] : theirs.get<Dict>()) {
      const Value* found = ours.get<Dict>().find(key);
      if (!found) return ::testing::AssertionFailure() << "no key " << to_string(key);
      if (auto result = close(*found, value); !result) return result << " at " << to_string(key);
    }
    return ::testing::AssertionSuccess();
  }
  if (sequence(ours) && sequence(theirs)) {
    if (ours.kind() != theirs.kind() || sequence(ours)->size() != sequence(theirs)->size()) return differ();
    for (std::size_t i = 0; i < sequence(ours)->size(); ++i) {
      if (auto result = close((*sequence(ours))[i], (*sequence(theirs))[i]); !result) return result << " at " << i;
    }
    return ::testing::AssertionSuccess();
  }
  const auto is_number = [](const Value& value) {
    return value.is<std::int64_t>() || value.is<double>() || value.is<at::Tensor>();
  };
  if (!is_number(ours) || !is_number(theirs)) return ours == theirs ? ::testing::AssertionSuccess() : differ();
  const at::Tensor a = as_tensor(ours), b = as_tensor(theirs);
  const bool same = a.sizes() == b.sizes() && at::allclose(a, b, 1e-5, 1e-7);
  return same ? ::testing::AssertionSuccess() : differ() << ": " << a << b;
}

}  // namespace tessera::testing
