#pragma once
// Full gradients of a sharded model, and their comparison with those of one process.

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <vector>

#include "fsdp/small_model.h"
#include "tessera/base/function_ref.h"
#include "tessera/comm/local_ranks.h"

namespace tessera::fsdp {

// Returns the full gradients of the parameters, undefined where there is none. A collective.
inline std::vector<at::Tensor> unsharded_grads(ShardedModule& model) {
  std::vector<at::Tensor> grads;
  SummonOptions with_grads;
  with_grads.with_grads = true;
  model.summon_full_params(
      [&] {
        for (const at::Tensor& param : unique_params(*model.module_ptr())) {
          grads.push_back(param.grad().defined() ? param.grad().clone() : at::Tensor());
        }
      },
      with_grads);
  return grads;
}

// Sets gradients that are missing to 0, as those of parameters are that a unit has and does not use.
inline void zero_missing_grads(const torch::nn::Module& module) {
  for (const at::Tensor& param : module.parameters()) {
    if (!param.grad().defined()) param.mutable_grad() = at::zeros_like(param);
  }
}

inline void expect_same_grads(const std::vector<at::Tensor>& found, const torch::nn::Module& expected) {
  const std::vector<at::Tensor> params = unique_params(expected);
  ASSERT_EQ(found.size(), params.size());
  for (std::size_t i = 0; i < found.size(); ++i) {
    ASSERT_EQ(found[i].defined(), params[i].grad().defined()) << i;
    if (found[i].defined()) {
      EXPECT_TRUE(at::allclose(found[i], params[i].grad(), 1e-12, 1e-14)) << i;
    }
  }
}

using CallOfModel = std::function<at::Tensor(const at::Tensor& x)>;

// Computes gradients on 2 ranks by `step(call, model, rank)`, where `call` calls the model, and compares them with
// those of one process. `make` makes the model of a rank, and `prepare` gets the sharded one.
template <typename Make, typename Step>
void expect_same_gradients_as_alone(const Make& make, const Step& step,
                                    FunctionRef<void(ShardedModule& model)> prepare = nullptr) {
  auto expected = make(0);
  const std::vector<at::Tensor> params = expected->parameters();
  for (const int rank : {0, 1}) {
    auto alone = make(rank);
    step(CallOfModel([&](const at::Tensor& x) { return alone->forward(x); }), *alone, rank);
    for (std::size_t i = 0; i < params.size(); ++i) {
      if (!params[i].requires_grad()) continue;
      at::Tensor& sum = params[i].mutable_grad();
      if (!sum.defined()) sum = at::zeros_like(params[i]).detach();
      const at::Tensor grad = alone->parameters()[i].grad();
      if (grad.defined()) sum.add_(grad, 0.5);
    }
  }
  const bool are_some_frozen =
      std::any_of(params.begin(), params.end(), [](const at::Tensor& param) { return !param.requires_grad(); });
  run_local(2, [&](const ProcessGroup& group) {
    for (const Options& way : kWays) {
      if (are_some_frozen && !way.use_orig_params) continue;
      FullyShardedDataParallel<decltype(make(0))> model(make(group.rank()), group, way);
      if (prepare) prepare(model);
      for (int times = 0; times < 2; ++times) {
        model.zero_grad();
        step(CallOfModel([&](const at::Tensor& x) { return model(x); }), *model.operator->(), group.rank());
        expect_same_grads(unsharded_grads(model), *expected);
        for (std::size_t i = 0; i < model.unit_count(); ++i) {
          EXPECT_FALSE(model.handle(i).is_gathered() && is_sharded(way.strategy)) << model.unit_name(i);
        }
      }
    }
  });
}

}  // namespace tessera::fsdp
