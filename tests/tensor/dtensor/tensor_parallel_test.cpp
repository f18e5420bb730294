// Parallel layers compute the same as the full layers in one process.

#include "tessera/tensor/tensor_parallel.h"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>

#include "support/chaos.h"
#include "support/error_matchers.h"
#include "tensor/mesh_support.h"
#include "tessera/base/function_ref.h"
#include "tessera/comm/comm_debug_mode.h"
#include "tessera/comm/local_ranks.h"
#include "tessera/tensor/dtensor_ops.h"
#include "tessera/tensor/internal/replace_data.h"

namespace tessera {
namespace {

using testing::indexed;
using testing::part_of;
using testing::R;
using testing::S0;
using testing::S1;
using testing::Sizes;

const Placement Last = Placement::shard(-1);

// The same numbers on every rank.
void fill(torch::nn::Module& module) {
  module.to(at::kDouble);
  double phase = 0;
  for (const at::Tensor& parameter : module.parameters()) {
    parameter.detach().copy_(indexed(parameter.sizes().vec()).add(phase).sin());
    phase += 5;
  }
}

at::Tensor input_of(const Sizes& size) { return indexed(size).mul(0.3).cos(); }

// Checks that `found` is this rank's part of `full` under `placement`.
void expect_part(const at::Tensor& found, const at::Tensor& full, const DeviceMesh& mesh, const Placement& placement,
                 const std::string& what) {
  const MeshLayout layout(full.sizes().vec(), mesh.shape(),
                          normalized({&placement, 1}, static_cast<std::size_t>(full.dim())));
  ASSERT_TRUE(found.defined()) << what;
  const at::Tensor expected = part_of(full, layout, *mesh.coordinate());
  ASSERT_EQ(found.sizes(), expected.sizes()) << what;
  ASSERT_TRUE(at::allclose(found, expected, 1e-10, 1e-12)) << what << "\n" << found << "\n" << expected;
}

at::Tensor local_part(const at::Tensor& full, const DeviceMesh& mesh, const Placement& placement) {
  const MeshLayout layout(full.sizes().vec(), mesh.shape(),
                          normalized({&placement, 1}, static_cast<std::size_t>(full.dim())));
  return part_of(full, layout, *mesh.coordinate());
}

// Compares results and gradients of a parallelized layer with those of the full layer. `x_is` and `y_is` are the
// placements of input and result.
template <typename Layer>
void compare(const ProcessGroup& group, FunctionRef<Layer()> make, const ParallelStyle& style, const at::Tensor& full_x,
             const Placement& x_is, const Placement& y_is) {
  const std::string what =
      to_string(style) + " of " + to_string(x_is) + " to " + to_string(y_is) + " on " + std::to_string(group.size());
  const DeviceMesh mesh(group, {group.size()}, {"tp"});
  const bool has_gradient = full_x.is_floating_point();

  Layer full = make();
  fill(*full);
  const at::Tensor x = full_x.clone().set_requires_grad(has_gradient);
  const at::Tensor y = full->forward(x);
  const at::Tensor weights = indexed(y.sizes().vec()).sin();
  (y * weights).sum().backward();

  Layer layer = make();
  fill(*layer);
  if (group.rank() != 0) {
    for (const at::Tensor& parameter : layer->parameters())
      parameter.detach().zero_();  // only the first rank's elements are used
  }
  const at::Tensor before = layer->weight;
  parallelize_module(*layer, mesh, {{"", style}});
  EXPECT_TRUE(before.is_same(layer->weight));
  const at::Tensor local_x = local_part(full_x, mesh, x_is).set_requires_grad(has_gradient);
  const at::Tensor local_y = layer->forward(local_x);
  expect_part(local_y, y, mesh, y_is, what);
  (local_y * local_part(weights, mesh, y_is)).sum().backward();
  if (has_gradient) expect_part(local_x.grad(), x.grad(), mesh, x_is, what + ", the input's gradient");
  for (const auto& parameter : layer->named_parameters()) {
    const DTensorSpec* spec = layer->dtensor_spec(parameter.key());
    ASSERT_NE(spec, nullptr);
    const at::Tensor of_full = full->named_parameters()[parameter.key()];
    expect_part(parameter.value(), of_full, mesh, spec->layout.placements()[0], what + ", " + parameter.key());
    expect_part(parameter.value().grad(), of_full.grad(), mesh, spec->layout.placements()[0],
                what + ", gradient of " + parameter.key());
  }
}

class TensorParallelWorlds : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(, TensorParallelWorlds, ::testing::Range(1, 9), ::testing::PrintToStringParamName());

TEST_P(TensorParallelWorlds, ALinearLayer) {
  const at::Tensor x = input_of({2, 8, 6});
  for (const bool has_bias : {true, false}) {
    const auto make = [&] { return ParallelLinear(torch::nn::LinearOptions(6, 7).bias(has_bias)); };
    run_local(GetParam(), [&](const ProcessGroup& group) {
      testing::SampleIfSanitized sample(3, has_bias ? 1 : 0);
      for (const Placement& in : {R, Last}) {
        for (const Placement& out : {R, Last, S0}) {
          if (!sample.takes_next()) continue;
          compare<ParallelLinear>(group, make, ColwiseParallel{in, out}, x, in, out);
          compare<ParallelLinear>(group, make, RowwiseParallel{in, out}, x, in, out);
        }
      }
      compare<ParallelLinear>(group, make, ColwiseParallel{}, x, R, Last);
      compare<ParallelLinear>(group, make, RowwiseParallel{}, x, Last, R);
      if (8 % group.size() == 0) compare<ParallelLinear>(group, make, ColwiseParallel{S1}, x, S1, Last);
    });
  }
}

TEST_P(TensorParallelWorlds, AnEmbedding) {
  const at::Tensor ids = at::tensor({3, 0, 10, 4, 4, 9, 1, 3}, at::kLong).view({2, 4});
  for (const bool has_padding : {false, true}) {
    const auto make = [&] {
      torch::nn::EmbeddingOptions options(11, 5);
      if (has_padding) options.padding_idx(4);
      return ParallelEmbedding(options);
    };
    run_local(GetParam(), [&](const ProcessGroup& group) {
      testing::SampleIfSanitized sample(2, has_padding ? 1 : 0);
      for (const Placement& out : {R, Last, S1}) {
        if (!sample.takes_next()) continue;
        compare<ParallelEmbedding>(group, make, ColwiseParallel{R, out}, ids, R, out);
        compare<ParallelEmbedding>(group, make, RowwiseParallel{R, out}, ids, R, out);
      }
      compare<ParallelEmbedding>(group, make, RowwiseParallel{}, ids, R, R);
      if (4 % group.size() == 0) compare<ParallelEmbedding>(group, make, RowwiseParallel{S1, S1}, ids, S1, S1);
    });
  }
}

TEST_P(TensorParallelWorlds, ALayerNorm) {
  const at::Tensor x = input_of({2, 5, 6});
  const auto make = [] { return ParallelLayerNorm(torch::nn::LayerNormOptions({6})); };
  run_local(GetParam(), [&](const ProcessGroup& group) {
    for (const std::int64_t dim : {0, 1, -2}) {
      const Placement shard = Placement::shard(dim);
      compare<ParallelLayerNorm>(group, make, SequenceParallel{dim}, x, shard, shard);
    }
  });
}

// A custom layer whose weight is tied to that of another.
class TiedHeadImpl : public torch::nn::Module, public TensorParallel {
 public:
  explicit TiedHeadImpl(const at::Tensor& weight_in) : weight(register_parameter("weight", weight_in)) {}
  at::Tensor forward(const at::Tensor& x) {
    if (!is_parallelized()) return at::linear(x, weight);
    return output(dtensor::linear(input(x), parameter(name_of_weight, weight)));
  }
  at::Tensor weight;
  std::string name_of_weight = "weight";

 protected:
  Parallelization parallelization(const ParallelStyle& style) const override {
    const auto& colwise = std::get<ColwiseParallel>(style);
    return {{{"weight", {S0, weight.sizes().vec()}}}, colwise.input_layout, R, colwise.output_layout};
  }
};
TORCH_MODULE(TiedHead);

struct BlockImpl : torch::nn::Module {
  BlockImpl() {
    register_module("norm", norm);
    register_module("up", up);
    register_module("act", act);
    register_module("down", down);
  }
  at::Tensor forward(const at::Tensor& x) { return x + down(act(up(norm(x)))); }
  ParallelLayerNorm norm{Sizes{8}};
  ParallelLinear up{8, 13}, down{13, 8};
  torch::nn::Tanh act;
};
TORCH_MODULE(Block);

struct NetImpl : torch::nn::Module {
  NetImpl() : head(ids->weight), layers(Block(), Block()) {
    register_module("ids", ids);
    register_module("head", head);
    register_module("layers", layers);
  }
  at::Tensor forward(const at::Tensor& x) { return head(layers->forward(ids(x))); }
  ParallelEmbedding ids{11, 8};
  TiedHead head;
  torch::nn::Sequential layers;
};
TORCH_MODULE(Net);

// Between the layers, replicated and sharded along the sequence.
ParallelPlan plan_of(bool is_sequence_parallel) {
  if (!is_sequence_parallel) {
    return {{"ids", RowwiseParallel{}},
            {"layers.*.up", ColwiseParallel{}},
            {"layers.*.down", RowwiseParallel{}},
            {"head", ColwiseParallel{R, R}}};
  }
  return {{"ids", RowwiseParallel{std::nullopt, S1}},
          {"layers.*.norm", SequenceParallel{}},
          {"layers.*.up", ColwiseParallel{S1}},
          {"layers.*.down", RowwiseParallel{std::nullopt, S1}},
          {"head", ColwiseParallel{S1, R}}};
}

TEST_P(TensorParallelWorlds, AModel) {
  const at::Tensor x = at::arange(18, at::kLong).mul(7).remainder(11).view({2, 9});
  Net full;
  fill(*full);
  const at::Tensor y = full->forward(x);
  y.square().mean().backward();
  for (const bool is_sequence_parallel : {false, true}) {
    run_local(GetParam(), [&](const ProcessGroup& group) {
      const DeviceMesh mesh(group, {group.size()}, {"tp"});
      Net net;
      fill(*net);
      parallelize_module(*net, mesh, plan_of(is_sequence_parallel));
      const at::Tensor result = net->forward(x);
      ASSERT_TRUE(at::allclose(result, y, 1e-10, 1e-12));
      result.square().mean().backward();
      for (const auto& parameter : full->named_parameters()) {
        const at::Tensor local = net->named_parameters()[parameter.key()];
        const auto is = [&](const char* part) { return parameter.key().find(part) != std::string::npos; };
        const bool is_rows = is("ids") || is("head") || is("up"), is_columns = is("down.weight");
        expect_part(local.grad(), parameter.value().grad(), mesh, is_rows ? S0 : is_columns ? S1 : R, parameter.key());
      }
    });
  }
}

// Which of net0, ..., net9 a pattern selects.
TEST(TensorParallelTest, APatternSelectsNames) {
  run_local(2, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2});
    const auto selected = [&](const std::vector<std::string>& patterns) {
      const auto net = std::make_shared<torch::nn::Module>("net"), inner = std::make_shared<torch::nn::Module>("inner");
      for (const char* name : {"net1", "net2", "net3", "net10"}) net->register_module(name, ParallelLinear(4, 4));
      net->register_module("inner", inner);
      inner->register_module("net1", ParallelLinear(4, 4));
      ParallelPlan plan;
      for (const std::string& pattern : patterns) plan.emplace_back(pattern, ColwiseParallel{});
      parallelize_module(*net, mesh, plan);
      std::string found;
      for (const auto& module : net->named_modules()) {
        const auto* layer = dynamic_cast<const ParallelLinearImpl*>(module.value().get());
        if (layer != nullptr && layer->is_parallelized()) found += (found.empty() ? "" : " ") + module.key();
      }
      return found;
    };
    EXPECT_EQ(selected({"net*"}), "net1 net2 net3 net10");
    EXPECT_EQ(selected({"net?"}), "net1 net2 net3");
    EXPECT_EQ(selected({"net[1-2]"}), "net1 net2");
    EXPECT_EQ(selected({"net[0-9][0-9]"}), "net10");
    EXPECT_EQ(selected({"*.net1"}), "inner.net1");
    EXPECT_EQ(selected({"inn*.n?t*", "net[!1]"}), "net2 net3 inner.net1");
  });
}

TEST(TensorParallelTest, TheParametersAreThoseOfTheRankGiven) {
  run_local(3, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {3});
    const auto made = [&](std::optional<std::int64_t> src_data_rank) {
      ParallelLinear layer(4, 7);
      layer->weight.detach().fill_(group.rank());
      layer->bias.detach().fill_(group.rank() + 10);
      parallelize_module(*layer, mesh, {{"", ColwiseParallel{}}}, src_data_rank);
      return layer;
    };
    const std::int64_t rows = group.rank() == 2 ? 1 : 3;
    for (const std::int64_t source : {0, 1, 2}) {
      const ParallelLinear layer = made(source);
      EXPECT_TRUE(at::equal(layer->weight, at::full({rows, 4}, static_cast<double>(source), at::kFloat)));
      EXPECT_TRUE(at::equal(layer->bias, at::full({rows}, static_cast<double>(source) + 10, at::kFloat)));
    }
    EXPECT_TRUE(at::equal(made(std::nullopt)->weight, at::full({rows, 4}, group.rank(), at::kFloat)));
    EXPECT_ERROR(made(3), ErrorCode::invalid_argument, "parameters of rank 3 on DeviceMesh(3): expected 0 to 2");
    EXPECT_ERROR(made(group.rank() == 1 ? 1 : 0), ErrorCode::invalid_argument,
                 "rank 0 has src_data_rank 0 and rank 1 has src_data_rank 1");
  });
}

TEST(TensorParallelTest, FrozenParametersStayFrozen) {
  const at::Tensor x = input_of({3, 6});
  for (const bool is_colwise : {true, false}) {
    run_local(2, [&](const ProcessGroup& group) {
      const DeviceMesh mesh(group, {2});
      const ParallelStyle style =
          is_colwise ? ParallelStyle(ColwiseParallel{R, R}) : ParallelStyle(RowwiseParallel{R, R});
      for (const char* frozen : {"weight", "bias"}) {
        ParallelLinear full(6, 5), layer(6, 5);
        for (ParallelLinear each : {full, layer}) {
          fill(*each);
          each->named_parameters()[frozen].set_requires_grad(false);
        }
        parallelize_module(*layer, mesh, {{"", style}});
        full(x).square().sum().backward();
        layer(x).square().sum().backward();
        for (const auto& parameter : layer->named_parameters()) {
          EXPECT_EQ(parameter.value().requires_grad(), parameter.key() != frozen);
          if (parameter.key() == frozen) {
            EXPECT_FALSE(parameter.value().grad().defined());
          } else {
            expect_part(parameter.value().grad(), full->named_parameters()[parameter.key()].grad(), mesh,
                        layer->dtensor_spec(parameter.key())->layout.placements()[0], parameter.key());
          }
        }
      }
    });
  }
}

TEST(TensorParallelTest, AnRmsNormAndADropoutOnAShardOfTheSequence) {
  const at::Tensor x = input_of({2, 5, 6});
  for (const int ranks : {1, 2, 3, 7}) {
    run_local(ranks, [&](const ProcessGroup& group) {
      const DeviceMesh mesh(group, {ranks});
      compare<ParallelRMSNorm>(
          group, [] { return ParallelRMSNorm(Sizes{6}, 1e-6); }, SequenceParallel{}, x, S1, S1);
      ParallelRMSNorm plain(Sizes{6}, 0.5, false);
      EXPECT_TRUE(plain->parameters().empty());
      EXPECT_TRUE(at::allclose(plain(x), x * at::rsqrt(x.square().mean(-1, true) + 0.5)));
      EXPECT_ERROR(parallelize_module(*plain, mesh, {{"", ColwiseParallel{}}}), ErrorCode::invalid_argument,
                   "parallelize an RMS norm: style is ColwiseParallel, expected SequenceParallel");

      ParallelDropout full(0.4, PhiloxGenerator(5)), layer(0.4, PhiloxGenerator(5));
      parallelize_module(*layer, mesh, {{"", SequenceParallel{}}});
      for (int step = 0; step < 2; ++step) {
        const at::Tensor leaf = x.clone().requires_grad_(), local = local_part(x, mesh, S1).requires_grad_();
        const at::Tensor y = full(leaf), found = layer(local);
        EXPECT_GT(y.eq(0).sum().item<std::int64_t>(), 5);
        expect_part(found, y, mesh, S1, "dropout");
        y.sum().backward();
        found.sum().backward();
        expect_part(local.grad(), leaf.grad(), mesh, S1, "gradient of a dropout");
        EXPECT_EQ(layer->generator, full->generator);
      }
      layer->eval();
      EXPECT_TRUE(layer(x).is_same(x));
    });
  }
}

// Built on meta and parallelized, a model gets the values that it gets in one process.
TEST(TensorParallelTest, InitialValuesDontDependOnTheMesh) {
  const auto made = [] {
    torch::nn::Sequential net;
    net->push_back("ids", ParallelEmbedding(torch::nn::EmbeddingOptions(11, 6).padding_idx(8)));
    net->push_back("norm", ParallelLayerNorm(torch::nn::LayerNormOptions({6})));
    net->push_back("rms", ParallelRMSNorm(Sizes{6}));
    net->push_back("up", ParallelLinear(6, 9));
    net->push_back("down", ParallelLinear(9, 6));
    net->push_back("plain", torch::nn::Tanh());
    return net;
  };
  torch::nn::Sequential full = made();
  PhiloxGenerator of_full(7);
  initialize_parameters(*full, of_full);
  const auto of = [&](const char* name) { return full->named_parameters()[name]; };
  EXPECT_LE(of("up.weight").abs().max().item<double>(), 1 / std::sqrt(6.0));
  EXPECT_GT(of("up.weight").abs().max().item<double>(), 0.8 / std::sqrt(6.0));
  EXPECT_LE(of("down.bias").abs().max().item<double>(), 1 / std::sqrt(9.0));
  EXPECT_GT(of("down.bias").std().item<double>(), 0.05);
  EXPECT_TRUE(at::equal(of("ids.weight").select(0, 8), at::zeros({6})));
  EXPECT_NEAR(of("ids.weight").std().item<double>(), 1, 0.3);
  EXPECT_TRUE(at::equal(of("norm.weight"), at::ones({6})) && at::equal(of("rms.weight"), at::ones({6})));
  for (const int ranks : {1, 2, 4}) {
    run_local(ranks, [&](const ProcessGroup& group) {
      const DeviceMesh mesh(group, {ranks});
      torch::nn::Sequential net = made();
      for (const at::Tensor& parameter : net->parameters()) replace_data(parameter, parameter.detach().to(at::kMeta));
      parallelize_module(*net, mesh,
                         {{"ids", RowwiseParallel{}},
                          {"norm", SequenceParallel{}},
                          {"up", ColwiseParallel{}},
                          {"down", RowwiseParallel{}}});
      const at::Tensor before = net->named_parameters()["up.weight"];
      ASSERT_TRUE(before.is_meta());
      PhiloxGenerator generator(7);
      initialize_parameters(*net, generator);
      EXPECT_EQ(generator, of_full);
      EXPECT_TRUE(before.is_same(net->named_parameters()["up.weight"]));
      EXPECT_TRUE(before.requires_grad() && before.is_cpu());
      for (const auto& parameter : net->named_parameters()) {
        const auto is = [&](const char* part) { return parameter.key().find(part) != std::string::npos; };
        const Placement placement = is("ids") || is("up") ? S0 : is("down.weight") ? S1 : R;
        expect_part(parameter.value(), of(parameter.key().c_str()), mesh, placement, parameter.key());
      }
      // Once more, from the next numbers.
      initialize_parameters(*net, generator);
      EXPECT_TRUE(before.numel() == 0 || !at::equal(before, local_part(of("up.weight"), mesh, S0)));
      net->named_parameters()["up.weight"].sum().backward();
      EXPECT_TRUE(before.grad().defined());
    });
  }
}

TEST(TensorParallelTest, InferenceModeGivesTheSame) {
  const at::Tensor x = input_of({3, 8});
  Block full;
  fill(*full);
  const at::Tensor y = full->forward(x);
  run_local(2, [&](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2});
    Block block;
    fill(*block);
    parallelize_module(*block, mesh, {{"up", ColwiseParallel{}}, {"down", RowwiseParallel{}}});
    const c10::InferenceMode inference;
    const at::Tensor found = block->forward(x);
    EXPECT_TRUE(found.is_inference());
    EXPECT_TRUE(at::allclose(found, y, 1e-10, 1e-12));
  });
}

TEST(TensorParallelTest, AnMlpSendsOneSumForwardAndOneBackward) {
  run_local(2, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2});
    Block block;
    parallelize_module(*block, mesh, {{"up", ColwiseParallel{}}, {"down", RowwiseParallel{}}});
    const at::Tensor x = input_of({3, 8}).to(at::kFloat).requires_grad_();
    const std::map<std::string, std::int64_t> one_sum = {{"all_reduce", 1}};
    const CommDebugMode forward(group);
    const at::Tensor y = block->forward(x);
    EXPECT_EQ(forward.counts(), one_sum);
    const CommDebugMode backward(group);
    y.sum().backward();
    EXPECT_EQ(backward.counts(), one_sum);
  });
}

TEST(TensorParallelTest, RanksOutsideOfTheMeshAreLeftAlone) {
  run_local(3, [](const ProcessGroup& group) {
    const DeviceMesh mesh = DeviceMesh::of_ranks(group, {2}, {2, 0});
    ParallelLinear layer(4, 6);
    parallelize_module(*layer, mesh, {{"", ColwiseParallel{}}});
    EXPECT_EQ(layer->is_parallelized(), group.rank() != 1);
    EXPECT_EQ(layer->weight.size(0), group.rank() != 1 ? 3 : 6);
  });
}

TEST(TensorParallelTest, WhatIsNotParallelizedIsAnOrdinaryLayer) {
  ParallelLinear layer(4, 6);
  const at::Tensor x = input_of({2, 4}).to(at::kFloat);
  EXPECT_TRUE(at::equal(layer(x), at::linear(x, layer->weight, layer->bias)));
  EXPECT_EQ(layer->dtensor_spec("weight"), nullptr);
}

TEST(TensorParallelTest, ACloneIsALayerOfTheSameClassAndAParallelizedOneIsNotCloned) {
  // A container takes a clone only if it is of its module's class.
  torch::nn::Sequential net(ParallelEmbedding(7, 4), ParallelLinear(4, 4),
                            ParallelLayerNorm(torch::nn::LayerNormOptions({4})), ParallelRMSNorm(Sizes{4}, 0.5),
                            ParallelRMSNorm(Sizes{4}, 0.5, false), ParallelDropout(0.5, PhiloxGenerator(7)));
  fill(*net);
  const auto copy = std::dynamic_pointer_cast<torch::nn::SequentialImpl>(net->clone());
  ASSERT_NE(copy, nullptr);
  const at::Tensor ids = at::arange(6, at::kLong).view({2, 3}), expected = net->forward(ids);
  EXPECT_TRUE(at::equal(copy->forward(ids), expected));
  for (const at::Tensor& parameter : copy->parameters()) parameter.detach().zero_();
  EXPECT_GT(net->parameters().back().detach().abs().min().item<double>(), 0);
  for (std::size_t i = 0; i < net->size(); ++i) {
    torch::nn::Module& layer = *net->ptr(i);
    EXPECT_EQ(copy->ptr(i)->name(), layer.name());
    const ParallelStyle style = i < 2 ? ParallelStyle(ColwiseParallel{}) : SequenceParallel{};
    parallelize_module(layer, DeviceMesh(), {{"", style}});
    EXPECT_ERROR(layer.clone(), ErrorCode::unsupported, "clone of a parallelized module");
  }
}

TEST(TensorParallelTest, PlansThatDontFitAreRefusedAndNothingIsChanged) {
  run_local(2, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2}, {"tp"});
    Net net;
    const auto refused = [&](const ParallelPlan& plan, const char* expected) {
      EXPECT_ERROR(parallelize_module(*net, mesh, plan), ErrorCode::invalid_argument, expected);
      EXPECT_EQ(net->ids->weight.size(0), 11);
    };
    refused({{"head", ColwiseParallel{}}, {"ids", RowwiseParallel{}}, {"layers.*.out", ColwiseParallel{}}},
            "the plan names 'layers.*.out', but no module matches, expected the name of a module or a pattern");
    refused({{"layers", ColwiseParallel{}}}, "'layers' is torch::nn::SequentialImpl, expected a ParallelLinear");
    refused({{"layers.0.act", ColwiseParallel{}}}, "'layers.0.act' is torch::nn::TanhImpl");
    refused({{"layers.*.up", ColwiseParallel{}}, {"layers.1.up", RowwiseParallel{}}},
            "'layers.1.up' is in the plan twice");
    refused({{"layers.*.up", SequenceParallel{}}},
            "parallelize a linear layer: style is SequenceParallel, expected ColwiseParallel or RowwiseParallel");
    refused({{"layers.*.norm", RowwiseParallel{}}},
            "parallelize a layer norm: style is RowwiseParallel, expected SequenceParallel");
    refused({{"ids", SequenceParallel{}}},
            "parallelize an embedding: style is SequenceParallel, expected ColwiseParallel or RowwiseParallel");
    refused({{"layers.*.up", ColwiseParallel{Placement::partial()}}}, "layout P(sum), expected shard or replicate");
    refused({{"ids", RowwiseParallel{}}}, "'ids.weight' and 'head.weight' are one parameter");
    refused({{"ids", ColwiseParallel{}}, {"head", ColwiseParallel{}}}, "that shards it alike in both");

    const DeviceMesh two_dims(group, {2, 1}, {"dp", "tp"});
    EXPECT_ERROR(parallelize_module(*net, two_dims, {}), ErrorCode::invalid_argument,
                 "DeviceMesh(dp=2, tp=1), expected one dimension, such as");

    parallelize_module(*net, mesh, plan_of(false));
    EXPECT_ERROR(parallelize_module(*net, mesh, {{"layers.0.up", ColwiseParallel{}}}), ErrorCode::invalid_argument,
                 "'layers.0.up' is already parallelized");

    ParallelLinear changed(4, 6);
    changed->weight.set_data(at::zeros({12}));
    EXPECT_ERROR(parallelize_module(*changed, mesh, {{"", ColwiseParallel{}}}), ErrorCode::invalid_argument,
                 "'.weight' has shape [12], expected [6, 4]");
    ParallelLinear scaled(4, 6);
    scaled->register_parameter("scale", at::ones({6}));
    EXPECT_ERROR(parallelize_module(*scaled, mesh, {{"", ColwiseParallel{}}}), ErrorCode::invalid_argument,
                 "'.scale' is a parameter that ColwiseParallel does not place, expected none but [bias, weight]");
    ParallelEmbedding normed(torch::nn::EmbeddingOptions(4, 6).max_norm(1));
    EXPECT_ERROR(parallelize_module(*normed, mesh, {{"", ColwiseParallel{}}}), ErrorCode::unsupported, "max_norm");
  });
}

TEST(TensorParallelTest, InputsThatDontFitAreRefused) {
  run_local(2, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2}, {"tp"});
    ParallelLinear layer(4, 6), other(4, 6);
    parallelize_module(*layer, mesh, {{"", ColwiseParallel{S0}}});
    EXPECT_ERROR(layer(at::zeros({1 + 2 * group.rank(), 4})), ErrorCode::invalid_argument,
                 "input of a parallel layer, as [S(0)]: rank 0 of DeviceMesh(tp=2) has 1 of 4 along the sharded "
                 "dimension, expected 2");
    EXPECT_ERROR(layer(at::zeros({2, 5})), ErrorCode::invalid_argument, "linear of tensors of sizes [4, 5]",
                 "expected [..., in], [out, in] and a bias [out]");
    parallelize_module(*other, mesh, {{"", RowwiseParallel{}}});
    EXPECT_ERROR(other(at::zeros({2, 4})), ErrorCode::invalid_argument,
                 "local tensor has size [2, 4], expected [2, 2]");
    TiedHead head(at::ones({4, 6}));
    parallelize_module(*head, mesh, {{"", ColwiseParallel{}}});
    head->name_of_weight = "bias";
    EXPECT_ERROR(head(at::zeros({2, 6})), ErrorCode::invalid_argument,
                 "parameter 'bias' of a parallel layer was not parallelized, expected one of [weight]");
    ParallelEmbedding table(5, 2);
    parallelize_module(*table, mesh, {{"", RowwiseParallel{}}});
    EXPECT_ERROR(table(at::full({1}, 5, at::kLong)), ErrorCode::invalid_argument,
                 "embedding: id 5 is out of range, expected 0 to 4");
  });
}

}  // namespace
}  // namespace tessera
