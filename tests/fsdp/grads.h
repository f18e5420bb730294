#pragma once
// Full gradients of a sharded model, and their comparison with those of one process.

#include <gtest/gtest.h>

#include <vector>

#include "fsdp/small_model.h"

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

}  // namespace tessera::fsdp
