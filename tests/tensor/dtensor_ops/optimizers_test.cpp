// LibTorch's optimizers on the local tensors of DTensors.

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/optim.h>

#include "tensor/mesh_support.h"
#include "tessera/comm/local_ranks.h"
#include "tessera/tensor/dtensor_ops.h"

namespace tessera {
namespace {

using testing::cross;
using testing::indexed;
using testing::R;
using testing::S0;
using testing::S1;
using testing::Sizes;

using Create = std::function<std::unique_ptr<torch::optim::Optimizer>(const std::vector<at::Tensor>&)>;

template <typename Optimizer, typename Options>
Create with(const Options& options) {
  return
      [options](const std::vector<at::Tensor>& parameters) { return std::make_unique<Optimizer>(parameters, options); };
}

std::vector<std::pair<std::string, Create>> optimizers() {
  using namespace torch::optim;  // NOLINT(google-build-using-namespace)
  return {
      {"SGD", with<SGD>(SGDOptions(0.01))},
      {"SGD with momentum", with<SGD>(SGDOptions(0.01).momentum(0.9).dampening(0.1).weight_decay(0.1))},
      {"SGD with Nesterov's", with<SGD>(SGDOptions(0.01).momentum(0.8).nesterov(true))},
      {"Adam", with<Adam>(AdamOptions(0.1))},
      {"Adam amsgrad", with<Adam>(AdamOptions(0.1).betas({0.8, 0.99}).weight_decay(0.1).amsgrad(true))},
      {"AdamW", with<AdamW>(AdamWOptions(0.1).weight_decay(0.2))},
      {"RMSprop", with<RMSprop>(RMSpropOptions(0.05))},
      {"RMSprop with momentum", with<RMSprop>(RMSpropOptions(0.05).momentum(0.9).centered(true).weight_decay(0.1))},
      {"Adagrad", with<Adagrad>(AdagradOptions(0.1))},
      {"Adagrad with decay", with<Adagrad>(AdagradOptions(0.1).lr_decay(0.1).weight_decay(0.1))},
  };
}

struct Parameters {
  at::Tensor weight = at::sin(indexed({7, 4})), bias = at::cos(indexed({7})), scale = at::sin(indexed({5, 7}));
  at::Tensor inputs = at::cos(indexed({5, 4}) * 3);
};

// Returns the parameters after some steps in one process.
std::vector<at::Tensor> trained_in_one_process(const Create& create) {
  const Parameters start;
  const std::vector<at::Tensor> parameters = {start.weight.clone().set_requires_grad(true),
                                              start.bias.clone().set_requires_grad(true),
                                              start.scale.clone().set_requires_grad(true)};
  const auto optimizer = create(parameters);
  for (int step = 0; step < 4; ++step) {
    optimizer->zero_grad();
    (at::linear(start.inputs, parameters[0], parameters[1]).tanh() * parameters[2]).square().sum().backward();
    optimizer->step();
  }
  return parameters;
}

TEST(DTensorOptimizerTest, TrainsShardedParametersAsOneProcessDoes) {
  const auto all = optimizers();
  std::vector<std::vector<at::Tensor>> expected;
  expected.reserve(all.size());
  for (const auto& optimizer : all) expected.push_back(trained_in_one_process(optimizer.second));
  for (const Sizes& shape : {Sizes{3}, Sizes{2, 2}}) {
    run_local(static_cast<int>(mesh_size(shape)), [&](const ProcessGroup& group) {
      const DeviceMesh mesh(group, shape);
      std::vector<Placements> choices = cross({R, S0, S1}, shape.size());
      if (shape.size() == 2) choices.push_back({Placement::strided_shard(0, 2), S0});
      const Parameters start;
      const DTensor inputs = DTensor::from_local(start.inputs, mesh);
      for (std::size_t o = 0; o < all.size(); ++o) {
        for (std::size_t c = o % 3; c < choices.size(); c += shape.size() * 2 - 1) {
          Placements of_bias = choices[c];
          for (Placement& placement : of_bias) {
            if (placement == S1) placement = R;
          }
          const std::vector<DTensor> parameters = {
              distribute_tensor(start.weight.clone().set_requires_grad(true), mesh, choices[c]),
              distribute_tensor(start.bias.clone().set_requires_grad(true), mesh, of_bias),
              distribute_tensor(start.scale.clone().set_requires_grad(true), mesh, choices[(c + 1) % choices.size()])};
          std::vector<at::Tensor> locals;
          locals.reserve(parameters.size());
          for (const DTensor& parameter : parameters) locals.push_back(parameter.local_tensor());
          const auto optimizer = all[o].second(locals);
          for (int step = 0; step < 4; ++step) {
            optimizer->zero_grad();
            const DTensor outputs = dtensor::tanh(dtensor::linear(inputs, parameters[0], parameters[1]));
            dtensor::sum(dtensor::square(outputs * parameters[2])).full_tensor().backward();
            optimizer->step();
          }
          for (std::size_t i = 0; i < parameters.size(); ++i) {
            EXPECT_TRUE(at::allclose(parameters[i].full_tensor(), expected[o][i], 1e-9, 1e-12))
                << all[o].first << ", parameter " << i << " as " << to_string(parameters[i].placements());
          }
        }
      }
    });
  }
}

}  // namespace
}  // namespace tessera
