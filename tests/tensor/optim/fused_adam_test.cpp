#include "tessera/tensor/optim/fused_adam.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>

#include "support/error_matchers.h"
#include "tensor/mesh_support.h"
#include "tessera/base/function_ref.h"
#include "tessera/comm/local_ranks.h"
#include "tessera/tensor/dtensor_factories.h"

namespace tessera {
namespace {

using dtensor::FusedAdamOptions;
using dtensor::FusedAdamTensors;
using testing::cross;
using testing::indexed;
using testing::on_mesh;
using testing::P;
using testing::R;
using testing::S0;
using testing::S1;
using testing::Sizes;

constexpr int kSteps = 4;

at::Tensor gradient_of(const at::Tensor& full, int step) {
  return at::cos(indexed(full.sizes().vec()) * (step + 1)).to(full.scalar_type());
}

struct Setting {
  bool decays_weight, amsgrad;
  double weight_decay;
};
const std::vector<Setting> kSettings = {{false, false, 0}, {false, true, 0.1}, {true, false, 0.05}, {true, true, 0.2}};

FusedAdamOptions options_of(const Setting& setting) {
  FusedAdamOptions options;
  options.lr = 0.1;
  options.beta1 = 0.8;
  options.beta2 = 0.95;
  options.weight_decay = setting.weight_decay;
  options.amsgrad = setting.amsgrad;
  return options;
}

// Returns the tensor after some steps of LibTorch's optimizer.
at::Tensor stepped_by_libtorch(const at::Tensor& full, const Setting& setting) {
  const at::Tensor x = full.clone().set_requires_grad(true);
  const auto run = [&](auto&& optimizer) {
    for (int step = 0; step < kSteps; ++step) {
      x.mutable_grad() = gradient_of(full, step);
      optimizer.step();
    }
  };
  const auto configured = [&](auto options) {
    return options.betas({0.8, 0.95}).weight_decay(setting.weight_decay).amsgrad(setting.amsgrad);
  };
  if (setting.decays_weight) {
    run(torch::optim::AdamW(std::vector<at::Tensor>{x}, configured(torch::optim::AdamWOptions(0.1))));
  } else {
    run(torch::optim::Adam(std::vector<at::Tensor>{x}, configured(torch::optim::AdamOptions(0.1))));
  }
  return x.detach();
}

// Parameters with the state of an optimizer.
struct FusedTraining {
  FusedAdamTensors tensors;
  std::vector<at::Tensor> full;

  void add(const at::Tensor& start, const DTensor& parameter, const FusedAdamOptions& options) {
    full.push_back(start);
    tensors.params.push_back(parameter);
    tensors.exp_avgs.push_back(dtensor::zeros_like(parameter.detach()));
    tensors.exp_avg_sqs.push_back(dtensor::zeros_like(parameter.detach()));
    if (options.amsgrad) tensors.max_exp_avg_sqs.push_back(dtensor::zeros_like(parameter.detach()));
    tensors.state_steps.emplace_back(at::zeros({}));
  }
  // `gradients` are placed as each is given.
  void step(int step, const Setting& setting, const FusedAdamOptions& options,
            FunctionRef<DTensor(std::size_t i, const at::Tensor& full)> placed) {
    tensors.grads.clear();
    for (std::size_t i = 0; i < full.size(); ++i) {
      tensors.grads.push_back(placed(i, gradient_of(full[i], step)));
      const at::Tensor count = tensors.state_steps[i].plain();
      count.add_(1);
    }
    if (setting.decays_weight) {
      dtensor::fused_adamw_(tensors, options);
    } else {
      dtensor::fused_adam_(tensors, options);
    }
  }
};

TEST(FusedAdamTest, StepsAreThoseOfTheOptimizerOnTheFullTensors) {
  const at::Tensor start = at::sin(indexed({6, 4}));
  for (const Setting& setting : kSettings) {
    const at::Tensor expected = stepped_by_libtorch(start, setting);
    for (const Sizes& shape : {Sizes{3}, Sizes{2, 2}}) {
      run_local(static_cast<int>(mesh_size(shape)), [&](const ProcessGroup& group) {
        const DeviceMesh mesh(group, shape);
        const FusedAdamOptions options = options_of(setting);
        std::vector<Placements> choices = cross({R, S0, S1}, shape.size());
        if (shape.size() == 2) choices.push_back({Placement::strided_shard(0, 2), S0});
        for (const Placements& of_gradient : {Placements(shape.size(), R), Placements(shape.size(), P)}) {
          FusedTraining trained;
          for (const Placements& placements : choices) {
            trained.add(start, on_mesh(start, mesh, placements).requires_grad_(), options);
          }
          for (int step = 0; step < kSteps; ++step) {
            trained.step(step, setting, options, [&](std::size_t i, const at::Tensor& full) {
              return on_mesh(full, mesh, i % 2 == 0 ? choices[i] : of_gradient);
            });
          }
          for (const DTensor& parameter : trained.tensors.params) {
            EXPECT_TRUE(at::allclose(parameter.full_tensor(), expected, 1e-9, 1e-12)) << parameter;
          }
        }
      });
    }
  }
}

TEST(FusedAdamTest, ParametersMayBeOnSeveralMeshesAndOfSeveralDtypes) {
  const Setting setting = kSettings[3];
  const at::Tensor a = at::sin(indexed({6, 4})), b = at::cos(indexed({5})).to(at::kFloat),
                   c = at::sin(indexed({4, 4})).to(at::kBFloat16), d = at::cos(indexed({4, 6}));
  run_local(4, [&](const ProcessGroup& group) {
    const DeviceMesh plane(group, {2, 2}, {"x", "y"}), line = plane.flattened("all"), row = plane["y"];
    const FusedAdamOptions options = options_of(setting);
    FusedTraining trained;
    trained.add(a, on_mesh(a, plane, {Placement::strided_shard(0, 2), S0}), options);
    trained.add(b, on_mesh(b, line, {S0}), options);
    trained.add(c, on_mesh(c, row, {S1}), options);
    // Stored by columns, unlike its gradient.
    const DTensor turned = on_mesh(d, line, {S0});
    trained.add(d, DTensor::from_local(turned.to_local().t().contiguous().t(), line, {S0}, {d.sizes().vec()}), options);
    for (int step = 0; step < kSteps; ++step) {
      trained.step(step, setting, options, [&](std::size_t i, const at::Tensor& full) {
        const DTensor& parameter = trained.tensors.params[i];
        return on_mesh(full, parameter.device_mesh(), parameter.placements());
      });
    }
    for (std::size_t i = 0; i < trained.full.size(); ++i) {
      const double tolerance = i == 2 ? 0.1 : 1e-5;
      EXPECT_TRUE(at::allclose(trained.tensors.params[i].full_tensor().to(at::kDouble),
                               stepped_by_libtorch(trained.full[i], setting).to(at::kDouble), tolerance, tolerance))
          << trained.tensors.params[i];
    }
  });
}

TEST(FusedAdamTest, RanksOutsideOfAMeshLeaveItsParametersAlone) {
  const Setting setting = kSettings[3];
  const at::Tensor a = at::sin(indexed({6, 4})), b = at::cos(indexed({5}));
  run_local(2, [&](const ProcessGroup& group) {
    const DeviceMesh both(group, {2}), first = DeviceMesh::of_ranks(group, {1}, {0});
    FusedAdamOptions options = options_of(setting);
    const auto number_on = [](const DeviceMesh& mesh, double number) {
      return dtensor::AnyTensor(dtensor::full({1}, number, mesh, {}, at::kDouble));
    };
    FusedTraining trained;
    trained.add(a, distribute_tensor(a.clone(), both, {S0}), options);
    trained.add(b, distribute_tensor(b.clone(), first, {R}), options);
    options.lr = number_on(both, 0.1);
    for (int step = 0; step < kSteps; ++step) {
      trained.tensors.state_steps = {number_on(both, step + 1), number_on(first, step + 1)};
      trained.tensors.grads = {distribute_tensor(gradient_of(a, step), both, {S0}),
                               distribute_tensor(gradient_of(b, step), first, {R})};
      dtensor::fused_adamw_(trained.tensors, options);
    }
    EXPECT_TRUE(at::allclose(trained.tensors.params[0].full_tensor(), stepped_by_libtorch(a, setting), 1e-9, 1e-12));
    const at::Tensor of_first = trained.tensors.params[1].full_tensor();
    EXPECT_TRUE(group.rank() != 0 || at::allclose(of_first, stepped_by_libtorch(b, setting), 1e-9, 1e-12));
    // A number that a rank of the parameter does not have.
    options.lr = number_on(first, 0.1);
    if (group.rank() == 0) {
      dtensor::fused_adamw_(trained.tensors, options);
    } else {
      EXPECT_ERROR(dtensor::fused_adamw_(trained.tensors, options), ErrorCode::invalid_argument,
                   "lr is a DTensor of size [1] as [R] on DeviceMesh(1), which is not on this rank",
                   "expected it on all ranks of DeviceMesh(2)");
    }
  });
}

TEST(FusedAdamTest, TheLearningRateMayBeATensor) {
  const at::Tensor start = at::sin(indexed({6, 4}));
  const at::Tensor expected = stepped_by_libtorch(start, kSettings[2]);
  run_local(2, [&](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2});
    const at::Tensor rate = at::full({}, 0.1, at::kDouble);
    for (const dtensor::AnyTensor& lr : {dtensor::AnyTensor(rate), dtensor::AnyTensor(on_mesh(rate, mesh, {R})),
                                         dtensor::AnyTensor(on_mesh(rate, mesh, {P}))}) {
      FusedAdamOptions options = options_of(kSettings[2]);
      options.lr = lr;
      FusedTraining trained;
      trained.add(start, on_mesh(start, mesh, {S1}), options);
      for (int step = 0; step < kSteps; ++step) {
        trained.step(step, kSettings[2], options,
                     [&](std::size_t, const at::Tensor& full) { return on_mesh(full, mesh, {S1}); });
      }
      EXPECT_TRUE(at::allclose(trained.tensors.params[0].full_tensor(), expected, 1e-9, 1e-12));
    }
  });
}

TEST(FusedAdamTest, GradientsAreNegatedScaledOrSkipped) {
  const at::Tensor start = at::sin(indexed({6, 4}));
  const at::Tensor expected = stepped_by_libtorch(start, kSettings[0]);
  run_local(2, [&](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2});
    FusedAdamOptions options = options_of(kSettings[0]);
    options.maximize = true;
    options.grad_scale = at::full({1}, 4.0);
    options.found_inf = at::zeros({1});
    FusedTraining trained;
    trained.add(start, on_mesh(start, mesh, {S0}), options);
    const auto placed = [&](std::size_t, const at::Tensor& full) { return on_mesh(full * -4, mesh, {S0}); };
    for (int step = 0; step < kSteps; ++step) trained.step(step, kSettings[0], options, placed);
    EXPECT_TRUE(at::allclose(trained.tensors.params[0].full_tensor(), expected, 1e-9, 1e-12));
    options.found_inf->fill_(1);
    trained.step(0, kSettings[0], options, placed);
    EXPECT_TRUE(at::allclose(trained.tensors.params[0].full_tensor(), expected, 1e-9, 1e-12));
  });
}

TEST(FusedAdamTest, WhatDoesNotFitIsRefusedBeforeAnythingChanges) {
  run_local(2, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2});
    const at::Tensor full = indexed({4, 2});
    const auto with = [&](FunctionRef<void(FusedAdamTensors&, FusedAdamOptions&)> change) {
      FusedAdamTensors tensors;
      tensors.params = tensors.grads = {on_mesh(full, mesh, {S0}), on_mesh(full, mesh, {S0})};
      for (int i = 0; i < 2; ++i) {
        tensors.exp_avgs.push_back(dtensor::zeros_like(tensors.params[0]));
        tensors.exp_avg_sqs.push_back(dtensor::zeros_like(tensors.params[0]));
        tensors.state_steps.emplace_back(at::ones({}));
      }
      FusedAdamOptions options;
      change(tensors, options);
      const DTensor first = tensors.params[0];
      struct Unchanged {
        ~Unchanged() { EXPECT_TRUE(at::equal(first.full_tensor(), full)); }
        DTensor first;
        at::Tensor full;
      } const unchanged{first, full};
      dtensor::fused_adam_(tensors, options);
    };
    EXPECT_ERROR(with([](auto& t, auto&) { t.grads.pop_back(); }), ErrorCode::invalid_argument,
                 "fused_adam_: 1 grads, expected 2");
    EXPECT_ERROR(with([](auto&, auto& o) { o.amsgrad = true; }), ErrorCode::invalid_argument,
                 "0 max_exp_avg_sqs, expected 2");
    EXPECT_ERROR(with([](auto& t, auto&) { t.max_exp_avg_sqs = t.exp_avgs; }), ErrorCode::invalid_argument,
                 "2 max_exp_avg_sqs, expected 0");
    EXPECT_ERROR(with([&](auto& t, auto&) { t.exp_avgs[1] = on_mesh(full, mesh, {S1}); }), ErrorCode::invalid_argument,
                 "average 1 is a DTensor of size [4, 2] as [S(1)]", "expected it as its parameter");
    EXPECT_ERROR(with([](auto&, auto& o) { o.lr = dtensor::AnyTensor(at::ones({2})); }), ErrorCode::invalid_argument,
                 "lr has 2 elements, expected one");
    EXPECT_ERROR(with([&](auto& t, auto&) {
                   t.params[0] = on_mesh(full, mesh, {P});
                   t.exp_avgs[0] = t.exp_avg_sqs[0] = dtensor::zeros_like(t.params[0]);
                 }),
                 ErrorCode::unsupported, "would change the placements of the first tensor");
  });
}

}  // namespace
}  // namespace tessera
