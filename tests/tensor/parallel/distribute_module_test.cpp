// A distributed module computes the same as the full module in one process, whatever its placements.

#include "tessera/tensor/parallel/distribute_module.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <memory>

#include "support/error_matchers.h"
#include "tensor/mesh_support.h"
#include "tensor/sharding_support.h"
#include "tessera/base/function_ref.h"
#include "tessera/comm/local_ranks.h"
#include "tessera/tensor/dtensor/explicit_redistribution.h"
#include "tessera/tensor/internal/replace_data.h"
#include "tessera/tensor/shard_module.h"
#include "tessera/tensor/tensor_parallel.h"

namespace tessera {
namespace {

using testing::cross;
using testing::indexed;
using testing::P;
using testing::part_of;
using testing::R;
using testing::S0;
using testing::S1;
using testing::Sizes;

struct StackImpl : torch::nn::Module {
  StackImpl() {
    register_module("table", table);
    register_module("norm", norm);
    register_module("up", up);
    register_module("plain", plain);
    to(at::kDouble);
    double phase = 0;
    for (const at::Tensor& parameter : parameters()) {
      parameter.detach().copy_(indexed(parameter.sizes().vec()).add(phase += 5).sin());
    }
  }
  at::Tensor forward(const at::Tensor& ids) { return plain(at::tanh(up(norm(table(ids))))); }
  ParallelEmbedding table{7, 4};
  ParallelLayerNorm norm{Sizes{4}};
  ParallelLinear up{4, 5};
  torch::nn::Linear plain{5, 2};
};
TORCH_MODULE(Stack);

at::Tensor some_ids() { return at::tensor({3, 0, 6, 2, 2, 5}, at::kLong).view({2, 3}); }

// Returns placements of a parameter that cover every kind: `of_matrix` for the weights of table and up.
Placements placements_for(const std::string& module, const std::string& parameter, const Placements& of_matrix) {
  if (parameter == "weight" && (module == "table" || module == "up")) return of_matrix;
  if (module == "up") {  // the bias
    Placements of_bias = of_matrix;
    for (Placement& placement : of_bias) placement = placement.is_shard(0) ? S0 : R;
    return of_bias;
  }
  return {};
}

TEST(DistributeModuleTest, AnyPlacementsOnAnyMeshGiveTheSame) {
  Stack full;
  const at::Tensor y = full->forward(some_ids());
  y.square().mean().backward();
  for (const Sizes& shape : {Sizes{1}, Sizes{3}, Sizes{2, 2}}) {
    run_local(static_cast<int>(mesh_size(shape)), [&](const ProcessGroup& group) {
      const DeviceMesh mesh(group, shape);
      for (const Placements& of_matrix : cross({R, S0, S1}, shape.size())) {
        Stack net;
        if (group.rank() != 0) {
          for (const at::Tensor& parameter : net->parameters()) parameter.detach().zero_();
        }
        net->plain->bias.set_requires_grad(false);
        const at::Tensor before = net->up->weight;
        DistributeModuleOptions options;
        options.partition = [&](const std::string& module, const std::string& parameter, const at::Tensor& tensor) {
          EXPECT_EQ(tensor.sizes(), full->named_parameters()[module + "." + parameter].sizes());
          return placements_for(module, parameter, of_matrix);
        };
        distribute_module(*net, mesh, options);
        EXPECT_TRUE(before.is_same(net->up->weight));
        EXPECT_FALSE(net->plain->bias.requires_grad());
        const at::Tensor found = net->forward(some_ids());
        ASSERT_TRUE(at::allclose(found, y, 1e-10, 1e-12)) << to_string(of_matrix);
        found.square().mean().backward();
        for (const auto& parameter : net->named_parameters()) {
          const std::string& name = parameter.key();
          const std::size_t dot = name.find('.');
          Placements placements = placements_for(name.substr(0, dot), name.substr(dot + 1), of_matrix);
          placements.resize(shape.size());
          const at::Tensor expected = full->named_parameters()[name];
          const MeshLayout layout(expected.sizes().vec(), shape, placements);
          ASSERT_TRUE(at::equal(parameter.value(), part_of(expected, layout, *mesh.coordinate()))) << name;
          if (!parameter.value().requires_grad()) continue;
          ASSERT_TRUE(
              at::allclose(parameter.value().grad(), part_of(expected.grad(), layout, *mesh.coordinate()), 1e-9, 1e-12))
              << name << " as " << to_string(of_matrix);
        }
        ASSERT_NE(net->up->dtensor_spec("weight"), nullptr);
        EXPECT_EQ(net->up->dtensor_spec("weight")->layout.placements(), of_matrix);
      }
    });
  }
}

TEST(DistributeModuleTest, FunctionsConvertInputsAndResults) {
  run_local(2, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2});
    ParallelLinear full(4, 3), layer(4, 3);
    for (ParallelLinear each : {full, layer}) {
      each->to(at::kDouble);
      each->weight.detach().copy_(indexed({3, 4}));
      each->bias.detach().copy_(indexed({3}));
    }
    const at::Tensor all = indexed({6, 4}), y = full(all);
    y.square().sum().backward();
    DistributeModuleOptions options;
    std::vector<std::string> calls;
    options.input = [&](const std::string& module, const at::Tensor& local, const DeviceMesh& on) {
      calls.push_back("input of '" + module + "'");
      return DTensor::from_local(local, on, {S0});  // a shard of the batch
    };
    options.output = [&](const std::string& module, const DTensor& result) {
      calls.push_back("output of '" + module + "' as " + to_string(result.placements()));
      return result.to_local();
    };
    distribute_module(*layer, mesh, options);
    const at::Tensor mine = layer(all.narrow(0, 3 * group.rank(), 3));
    EXPECT_EQ(calls, (std::vector<std::string>{"input of ''", "output of '' as [S(0)]"}));
    EXPECT_TRUE(at::equal(mine, y.narrow(0, 3 * group.rank(), 3)));
    mine.square().sum().backward();
    EXPECT_TRUE(at::allclose(layer->weight.grad(), full->weight.grad()));  // of the entire batch
    EXPECT_TRUE(at::allclose(layer->bias.grad(), full->bias.grad()));
    // Another dtype afterwards.
    layer->to(at::kFloat);
    EXPECT_EQ(layer(all.narrow(0, 3 * group.rank(), 3).to(at::kFloat)).scalar_type(), at::kFloat);
  });
}

TEST(DistributeModuleTest, BuffersAreReplicatedAndMetaStaysMeta) {
  run_local(2, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2});
    torch::nn::BatchNorm1d norm(3);
    norm->running_mean.fill_(group.rank() + 1);
    distribute_module(*norm, mesh);
    EXPECT_TRUE(at::equal(norm->running_mean, at::ones({3})));
    DistributeModuleOptions of_second;
    of_second.src_data_rank = 1;
    norm->running_mean.fill_(group.rank() + 1);
    distribute_module(*norm, mesh, of_second);
    EXPECT_TRUE(at::equal(norm->running_mean, at::full({3}, 2.0)));

    ParallelLinear layer(4, 3);
    for (const at::Tensor& parameter : layer->parameters()) replace_data(parameter, parameter.detach().to(at::kMeta));
    DistributeModuleOptions options;
    options.partition = [](const std::string&, const std::string&, const at::Tensor&) { return Placements{S0}; };
    distribute_module(*layer, mesh, options);
    EXPECT_TRUE(layer->weight.is_meta());
    EXPECT_EQ(layer->weight.sizes(), (Sizes{group.rank() == 0 ? 2 : 1, 4}));
    EXPECT_EQ(layer->dtensor_spec("weight")->layout.size(), (Sizes{3, 4}));
  });
}

TEST(DistributeModuleTest, WhatDoesntFitIsRefusedByAllAndNothingIsChanged) {
  run_local(2, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2}, {"tp"});
    Stack net;
    const auto refused = [&](FunctionRef<Placements(const std::string&)> of_parameter, const char* expected) {
      DistributeModuleOptions options;
      options.partition = [&](const std::string& module, const std::string& parameter, const at::Tensor&) {
        return of_parameter(module + "." + parameter);
      };
      EXPECT_ERROR(distribute_module(*net, mesh, options), ErrorCode::invalid_argument, expected);
      EXPECT_EQ(net->up->weight.sizes(), (Sizes{5, 4}));
    };
    refused(
        [](const std::string& name) { return name == "plain.weight" ? Placements{S0} : Placements{}; },
        "'plain.weight' of torch::nn::LinearImpl is placed as [S(0)], expected replicate: only parameters of parallel "
        "layers can be sharded");
    refused([](const std::string& name) { return name == "up.weight" ? Placements{P} : Placements{}; },
            "'up.weight' of ");
    refused([](const std::string& name) { return name == "up.bias" ? Placements{S1} : Placements{}; },
            "placement S(1) of a tensor of 1 dimensions");
    refused([](const std::string&) { return Placements{S0, S0}; }, "expected one for each");
    const bool is_second = group.rank() == 1;
    refused(
        [&](const std::string& name) { return Placements{name == "up.weight" && is_second ? S1 : R}; },
        "rank 0 has parameter 'weight' Double [5, 4] as [R] and rank 1 has parameter 'weight' Double [5, 4] as [S(1)]");
    DistributeModuleOptions of_third;
    of_third.src_data_rank = 2;
    EXPECT_ERROR(distribute_module(*net, mesh, of_third), ErrorCode::invalid_argument,
                 "parameters of rank 2 on DeviceMesh(tp=2): expected 0 to 1");
    distribute_module(*net, mesh);
    EXPECT_ERROR(distribute_module(*net, mesh), ErrorCode::invalid_argument, "is already parallelized");
  });
}

TEST(DistributeModuleTest, AParameterThatIsShardedIsRefusedAndKeepsItsElements) {
  run_local(2, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2});
    torch::nn::Sequential net(ShardedEmbedding(8, 4), ParallelLinear(4, 3));
    shard_module(*net, ShardingPlan{{"0.weight", testing::chunk_spec(0, {0, 1})}}, group);
    const at::Tensor shard = net->parameters()[0].detach().clone();
    EXPECT_ERROR(distribute_module(*net, mesh), ErrorCode::invalid_argument,
                 "'0.weight' is already the local tensor of a DTensor as [S(0)], expected a full tensor");
    EXPECT_TRUE(at::equal(net->parameters()[0], shard));
    const auto layer = std::dynamic_pointer_cast<ParallelLinearImpl>(net->children()[1]);
    ASSERT_NE(layer, nullptr);
    EXPECT_FALSE(layer->is_parallelized());
    distribute_module(*layer, mesh);
    EXPECT_TRUE(layer->is_parallelized());
  });
}

TEST(DistributeModuleTest, ABufferOnMetaOnOneRankIsRefusedByAllAndNothingIsChanged) {
  run_local(2, [](const ProcessGroup& group) {
    torch::nn::BatchNorm1d norm(3);
    norm->running_mean.fill_(group.rank() + 1);
    if (group.rank() == 1) replace_data(norm->running_var, norm->running_var.to(at::kMeta));
    EXPECT_ERROR(distribute_module(*norm, DeviceMesh(group, {2})), ErrorCode::invalid_argument,
                 "rank 0 has buffer 'running_var' Float [3] and rank 1 has buffer 'running_var' Float [3] on meta");
    EXPECT_TRUE(at::equal(norm->running_mean, at::full({3}, group.rank() + 1.0)));
  });
}

// The layer redistributes its result, not an op that the program calls.
TEST(DistributeModuleTest, ResultsAndTheirGradientsPassAnExplicitRedistributionContext) {
  run_local(2, [](const ProcessGroup& group) {
    ParallelLinear full(4, 6), layer(4, 6);
    for (ParallelLinear each : {full, layer}) {
      each->to(at::kDouble);
      each->weight.detach().copy_(indexed({6, 4}));
      each->bias.detach().copy_(indexed({6}));
    }
    DistributeModuleOptions options;
    options.partition = [](const std::string&, const std::string&, const at::Tensor&) { return Placements{S0}; };
    distribute_module(*layer, DeviceMesh(group, {2}), options);
    const ExplicitRedistributionContext context;
    const at::Tensor x = indexed({3, 4}), expected = full(x), found = layer(x);
    EXPECT_TRUE(at::allclose(found, expected));
    expected.square().sum().backward();
    found.square().sum().backward();
    EXPECT_TRUE(at::allclose(layer->weight.grad(), full->weight.grad().narrow(0, 3 * group.rank(), 3)));
    EXPECT_TRUE(at::allclose(layer->bias.grad(), full->bias.grad().narrow(0, 3 * group.rank(), 3)));
  });
}

TEST(DistributeModuleTest, RanksOutsideOfTheMeshAreLeftAlone) {
  run_local(3, [](const ProcessGroup& group) {
    const DeviceMesh mesh = DeviceMesh::of_ranks(group, {2}, {2, 0});
    ParallelLinear layer(4, 6);
    DistributeModuleOptions options;
    options.partition = [](const std::string&, const std::string&, const at::Tensor&) { return Placements{S0}; };
    distribute_module(*layer, mesh, options);
    EXPECT_EQ(layer->weight.size(0), group.rank() != 1 ? 3 : 6);
  });
}

}  // namespace
}  // namespace tessera
