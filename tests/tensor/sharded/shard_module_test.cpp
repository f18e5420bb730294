// A module whose parameters are sharded gives each rank the results that it gave before, and shards of the gradients.

#include "tessera/tensor/shard_module.h"

#include <ATen/core/grad_mode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/optim/sgd.h>

#include "support/error_matchers.h"
#include "tensor/sharding_support.h"
#include "tessera/comm/local_ranks.h"
#include "tessera/tensor/dtensor.h"

namespace tessera {
namespace {

using testing::chunk_spec;
using testing::close;
using testing::full_of;
using testing::grid_spec;
using testing::leaf;
using testing::permuted_ranks;
using testing::random;
using testing::ranks_of;
using testing::Sizes;
using testing::SpecPtr;

class ShardModuleTest : public ::testing::TestWithParam<int> {
 protected:
  int world() const { return GetParam(); }
  std::vector<SpecPtr> specs() const {
    return {chunk_spec(0, ranks_of(world())), chunk_spec(-2, permuted_ranks(world())), chunk_spec(1, ranks_of(world())),
            chunk_spec(-1, permuted_ranks(world()))};
  }
};
INSTANTIATE_TEST_SUITE_P(Worlds, ShardModuleTest, ::testing::Values(1, 2, 3, 5));

void assign(const at::Tensor& parameter, const at::Tensor& value) {
  const at::NoGradGuard no_grad;
  parameter.copy_(value);
}

// Expects that the parameter is this rank's shard of `value`, with its shard of `gradient`.
void expect_shard(const ShardedTensor& sharded, const at::Tensor& value, const at::Tensor& gradient) {
  EXPECT_TRUE(close(full_of(sharded), value.detach()));
  const Shard& own = sharded.local_shards()[0];
  if (own.tensor.numel() == 0) return;
  EXPECT_TRUE(close(own.tensor.grad(), box_view(gradient, own.metadata.box()))) << to_string(sharded.metadata());
}

TEST_P(ShardModuleTest, LinearComputesAsBeforeOnEachRanksInput) {
  run_local(world(), [&](const ProcessGroup& group) {
    for (const SpecPtr& spec : specs()) {
      for (const Sizes& own_size : {Sizes{2, 7}, Sizes{2, 3, 7}, Sizes{7}}) {
        for (const bool with_bias : {true, false}) {
          Sizes size = {world()};
          size.insert(size.end(), own_size.begin(), own_size.end());
          const at::Tensor x = leaf(random(size, 1)), w = leaf(random({5, 7}, 2)), b = leaf(random({5}, 3));
          const at::Tensor expected = at::linear(x, w, with_bias ? b : at::Tensor());
          const at::Tensor weights = random(expected.sizes().vec(), 4);
          (expected * weights).sum().backward();

          ShardedLinear layer(torch::nn::LinearOptions(7, 5).bias(with_bias));
          layer->to(at::kDouble);
          assign(layer->weight, w);
          if (with_bias) assign(layer->bias, b);
          const at::Tensor own = leaf(x[group.rank()]);
          EXPECT_TRUE(close(layer(own).detach(), expected[group.rank()].detach()));
          shard_parameter(*layer, "weight", spec, group);
          const at::Tensor result = layer(own);
          EXPECT_TRUE(close(result.detach(), expected[group.rank()].detach())) << spec->to_string();
          (result * weights[group.rank()]).sum().backward();
          EXPECT_TRUE(close(own.grad(), x.grad()[group.rank()]));
          expect_shard(layer->sharded_parameter("weight", layer->weight), w, w.grad());
          if (with_bias) {
            EXPECT_TRUE(close(layer->bias.grad(), b.grad()));
          }
        }
      }
    }
  });
}

TEST_P(ShardModuleTest, EmbeddingComputesAsBeforeOnEachRanksInput) {
  run_local(world(), [&](const ProcessGroup& group) {
    for (const SpecPtr& spec : specs()) {
      const at::Tensor ids = random({world(), 4, 2}, 5).mul(3).to(at::kLong).remainder(6), w = leaf(random({6, 5}, 6));
      const at::Tensor expected = at::embedding(w, ids, 2), weights = random(expected.sizes().vec(), 7);
      (expected * weights).sum().backward();
      ShardedEmbedding layer(torch::nn::EmbeddingOptions(6, 5).padding_idx(2));
      layer->to(at::kDouble);
      assign(layer->weight, w);
      shard_parameter(*layer, "weight", spec, group);
      const at::Tensor result = layer(ids[group.rank()]);
      EXPECT_TRUE(close(result.detach(), expected[group.rank()].detach()));
      (result * weights[group.rank()]).sum().backward();
      expect_shard(layer->sharded_parameter("weight", layer->weight), w, w.grad());
    }
  });
}

TEST_P(ShardModuleTest, EmbeddingBagComputesAsBeforeOnEachRanksInput) {
  run_local(world(), [&](const ProcessGroup& group) {
    const std::vector<torch::nn::EmbeddingBagMode> modes = {torch::kSum, torch::kMean, torch::kMax};
    for (const SpecPtr& spec : specs()) {
      for (const torch::nn::EmbeddingBagMode& mode : modes) {
        const auto options = torch::nn::EmbeddingBagOptions(6, 5).mode(mode).max_norm(1.5).norm_type(1);
        const at::Tensor ids = random({world(), 3, 2}, 5).mul(3).to(at::kLong).remainder(6), w = random({6, 5}, 6);
        ShardedEmbeddingBag plain(options), layer(options);
        for (ShardedEmbeddingBag* each : {&plain, &layer}) {
          (*each)->to(at::kDouble);
          assign((*each)->weight, w);
        }
        const at::Tensor expected = plain(ids.view({-1, 2})).view({world(), 3, 5});
        const at::Tensor weights = random({world(), 3, 5}, 7);
        (expected * weights).sum().backward();
        shard_parameter(*layer, "weight", spec, group);
        const at::Tensor result = layer(ids[group.rank()]);
        EXPECT_TRUE(at::allclose(result, expected[group.rank()], 1e-6, 1e-9));
        (result * weights[group.rank()]).sum().backward();
        const ShardedTensor sharded = layer->sharded_parameter("weight", layer->weight);
        const Shard& own = sharded.local_shards()[0];
        if (own.tensor.numel() == 0) continue;
        EXPECT_TRUE(at::allclose(own.tensor.grad(), box_view(plain->weight.grad(), own.metadata.box()), 1e-6, 1e-9));
      }
    }
  });
}

TEST(ShardedEmbeddingBagTest, OffsetsAndWeightsOfSamples) {
  run_local(2, [](const ProcessGroup& group) {
    const auto options =
        torch::nn::EmbeddingBagOptions(6, 4).mode(torch::kSum).include_last_offset(true).padding_idx(1);
    ShardedEmbeddingBag layer(options);
    assign(layer->weight, random({6, 4}, 1, at::kFloat));
    const at::Tensor ids = at::tensor({5, 1, 2, 0, 5});
    const at::Tensor offsets = at::tensor({0, 2, 5}), weights = random({5}, 2, at::kFloat);
    const at::Tensor expected = layer(ids, offsets, weights).detach();
    shard_parameter(*layer, "weight", chunk_spec(1, {1, 0}), group);
    EXPECT_TRUE(at::allclose(layer(ids, offsets, weights), expected));
  });
}

struct ShardableNet : torch::nn::Module {
  ShardableNet() {
    words = register_module("words", ShardedEmbedding(11, 6));
    inner = register_module("inner", ShardedLinear(6, 9));
    head = register_module("head", ShardedLinear(9, 4));
    to(at::kDouble);
    std::uint64_t seed = 1;
    for (const at::Tensor& parameter : parameters()) assign(parameter, random(parameter.sizes().vec(), ++seed));
  }
  at::Tensor forward(const at::Tensor& ids) { return head(at::tanh(inner(words(ids)))); }
  ShardedEmbedding words{nullptr};
  ShardedLinear inner{nullptr}, head{nullptr};
};

TEST_P(ShardModuleTest, TrainingGivesTheParametersOfOneProcess) {
  run_local(world(), [&](const ProcessGroup& group) {
    ShardableNet full, net;
    const at::Tensor ids = at::arange(world() * 6).remainder(11).view({world(), 6});
    torch::optim::SGD of_full(full.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    torch::optim::SGD optimizer(net.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));  // before sharding
    shard_module(net,
                 {{"words.weight", chunk_spec(0, permuted_ranks(world()))},
                  {"inner.weight", chunk_spec(0, ranks_of(world()))},
                  {"head.weight", chunk_spec(1, permuted_ranks(world()))}},
                 group);
    for (int step = 0; step < 3; ++step) {
      of_full.zero_grad();
      full.forward(ids).square().sum().backward();
      of_full.step();
      optimizer.zero_grad();
      net.forward(ids[group.rank()]).square().sum().backward();
      optimizer.step();
    }
    EXPECT_TRUE(close(full_of(net.words->sharded_parameter("weight", net.words->weight)), full.words->weight.detach()));
    for (const auto& [layer, of_one] : {std::pair{net.inner, full.inner}, std::pair{net.head, full.head}}) {
      EXPECT_TRUE(close(full_of(layer->sharded_parameter("weight", layer->weight)), of_one->weight.detach()));
      EXPECT_TRUE(close(layer->bias.detach(), of_one->bias.detach()));
    }
  });
}

// A planner of a user: every weight by rows. PyTorch: ShardingPlanner.
ShardingPlan rows_of_all_weights(const torch::nn::Module& module, int ranks) {
  ShardingPlan plan;
  for (const auto& parameter : module.named_parameters()) {
    if (parameter.key().ends_with("weight")) plan[parameter.key()] = chunk_spec(0, ranks_of(ranks));
  }
  return plan;
}

std::vector<std::string> names_of(const std::vector<std::pair<std::string, ShardedTensor>>& parameters) {
  std::vector<std::string> names;
  names.reserve(parameters.size());
  for (const auto& [name, tensor] : parameters) names.push_back(name);
  return names;
}

TEST_P(ShardModuleTest, APlannerOfAUserShardsAModuleAndItsShardedParametersAreListed) {
  run_local(world(), [&](const ProcessGroup& group) {
    ShardableNet full, net;
    EXPECT_TRUE(named_sharded_parameters(net).empty());
    shard_module(net, rows_of_all_weights(net, world()), group);
    const auto sharded = named_sharded_parameters(net);
    EXPECT_THAT(names_of(sharded), ::testing::ElementsAre("words.weight", "inner.weight", "head.weight"));
    EXPECT_EQ(named_sharded_parameters(*net.inner).at(0).first, "weight");
    const auto parameters = net.named_parameters(), of_full = full.named_parameters();
    for (const auto& [name, tensor] : sharded) {
      EXPECT_TRUE(tensor.local_tensor().is_same(parameters[name])) << name;
      EXPECT_TRUE(close(full_of(tensor), of_full[name].detach())) << name;
    }
    // An optimizer of the local shards alone takes the step of the full parameters.
    std::vector<at::Tensor> shards, weights;
    for (const auto& [name, tensor] : sharded) {
      for (const Shard& shard : tensor.local_shards()) shards.push_back(shard.tensor);
      weights.push_back(of_full[name]);
    }
    torch::optim::SGD optimizer(shards, 0.1), optimizer_of_full(weights, 0.1);
    const at::Tensor ids = at::arange(world() * 6).remainder(11).view({world(), 6});
    full.forward(ids).square().sum().backward();
    optimizer_of_full.step();
    net.forward(ids[group.rank()]).square().sum().backward();
    optimizer.step();
    for (const auto& [name, tensor] : sharded) EXPECT_TRUE(close(full_of(tensor), of_full[name].detach())) << name;
  });
}

TEST(ShardModuleInSubgroupTest, OnlyItsRanksShardAndCompute) {
  run_local(4, [](const ProcessGroup& world) {
    const auto group = world.subgroup(std::vector<int>{1, 3});
    if (!group) return;
    ShardableNet full, net;
    shard_module(net, rows_of_all_weights(net, 2), *group);
    const at::Tensor ids = at::arange(12).remainder(11).view({2, 6});
    EXPECT_TRUE(close(net.forward(ids[group->rank()]).detach(), full.forward(ids)[group->rank()].detach()));
    for (const auto& [name, tensor] : named_sharded_parameters(net)) {
      EXPECT_TRUE(close(full_of(tensor), full.named_parameters()[name].detach())) << name;
    }
    // Ranks in placements are those of the subgroup.
    EXPECT_ERROR(shard_module(net, {{"head.bias", chunk_spec(0, {1, 3})}}, *group), ErrorCode::unsupported, "'bias'");
    ShardableNet other;
    EXPECT_ERROR(shard_module(other, {{"head.weight", chunk_spec(0, {1, 3})}}, *group), ErrorCode::invalid_argument,
                 "rank");
  });
}

TEST_P(ShardModuleTest, AParameterBecomesTheShardOfRankSrcAndKeepsItsIdentity) {
  run_local(world(), [&](const ProcessGroup& group) {
    const int src = world() - 1;
    for (const SpecPtr& spec : specs()) {
      ShardedLinear layer(3, 4);
      assign(layer->weight, at::full({4, 3}, group.rank()));
      layer->weight.mutable_grad() = at::ones({4, 3});
      layer->weight.set_requires_grad(false);
      const void* before = layer->weight.unsafeGetTensorImpl();
      EXPECT_EQ(layer->dtensor_spec("weight"), nullptr);
      shard_parameter(*layer, "weight", spec, group, src);
      EXPECT_EQ(layer->weight.unsafeGetTensorImpl(), before);
      EXPECT_EQ(layer->parameters()[0].unsafeGetTensorImpl(), before);
      EXPECT_FALSE(layer->weight.grad().defined());
      EXPECT_FALSE(layer->weight.requires_grad());
      EXPECT_TRUE(layer->is_sharded("weight"));
      EXPECT_FALSE(layer->is_sharded("bias"));
      EXPECT_EQ(layer->dtensor_spec("bias"), nullptr);
      const ShardedTensor sharded = layer->sharded_parameter("weight", layer->weight);
      EXPECT_EQ(sharded.sharding_spec(), *spec);
      EXPECT_TRUE(sharded.local_tensor().is_same(layer->weight));
      EXPECT_TRUE(full_of(sharded).equal(at::full({4, 3}, src)));
      layer->to(at::kDouble);
      EXPECT_EQ(layer->sharded_parameter("weight", layer->weight).scalar_type(), at::kDouble);
    }
  });
}

// State dicts use this.
TEST_P(ShardModuleTest, TheShardsAreThoseOfADTensor) {
  run_local(world(), [&](const ProcessGroup& group) {
    for (const SpecPtr& spec : specs()) {
      ShardedLinear layer(3, 4);
      const at::Tensor full = testing::indices({4, 3}, at::kFloat);
      assign(layer->weight, full);
      shard_parameter(*layer, "weight", spec, group);
      const DTensorSpec* of_weight = layer->dtensor_spec("weight");
      ASSERT_NE(of_weight, nullptr);
      const DTensor tensor(of_weight->mesh, of_weight->layout, layer->weight.detach());
      EXPECT_TRUE(tensor.full_tensor().equal(full)) << spec->to_string();
    }
  });
}

// A module of a user that computes with a sharded parameter.
struct Scale : torch::nn::Module, ShardedParameters {
  explicit Scale(const at::Tensor& all = at::ones({4, 2})) { factors = register_parameter("factors", all); }
  double sum_of_squares() const {
    const at::Tensor own = is_sharded("factors") ? sharded_parameter("factors", factors).local_tensor() : factors;
    return own.square().sum().item<double>();
  }
  at::Tensor factors;
};

TEST(ShardedParametersTest, AModuleOfAUser) {
  run_local(2, [](const ProcessGroup& group) {
    Scale scale;
    EXPECT_EQ(scale.sum_of_squares(), 8);
    EXPECT_ERROR(scale.sharded_parameter("factors", scale.factors), ErrorCode::invalid_argument,
                 "sharded parameter 'factors': it is not sharded");
    shard_parameter(scale, "factors", chunk_spec(0, {0, 1}), group);
    EXPECT_EQ(scale.sum_of_squares(), 4);
    EXPECT_ERROR(scale.sharded_parameter("factors", at::ones({1, 2})), ErrorCode::invalid_argument, "expected [2, 2]");
  });
}

// Two modules with one parameter, one of them under two names.
struct TiedScales : torch::nn::Module {
  TiedScales() {
    a = register_module("a", std::make_shared<Scale>());
    b = register_module("b", std::make_shared<Scale>(a->factors));
    register_module("c", a);
  }
  std::shared_ptr<Scale> a, b;
};

TEST(ShardModuleSharedTest, AParameterOfSeveralModulesIsShardedOnceInAll) {
  run_local(2, [](const ProcessGroup& group) {
    const SpecPtr rows = chunk_spec(0, {0, 1}), columns = chunk_spec(1, {0, 1});
    TiedScales tied;
    EXPECT_ERROR(shard_module(tied, {{"a.factors", rows}}, group), ErrorCode::invalid_argument,
                 "'a.factors' and 'b.factors' are one parameter, expected a plan that shards it alike in both");
    EXPECT_ERROR(shard_module(tied, {{"a.factors", rows}, {"b.factors", columns}}, group), ErrorCode::invalid_argument,
                 "'a.factors' and 'b.factors' are one parameter");
    shard_module(tied, {{"a.factors", rows}, {"b.factors", chunk_spec(0, {0, 1})}}, group);
    EXPECT_TRUE(tied.a->factors.is_same(tied.b->factors));
    EXPECT_EQ(tied.a->sum_of_squares(), 4);
    EXPECT_EQ(tied.b->sum_of_squares(), 4);
  });
}

TEST(ShardModuleRefusalTest, EveryRankThrowsBeforeAnythingChanges) {
  run_local(2, [](const ProcessGroup& group) {
    const SpecPtr rows = chunk_spec(0, {0, 1});
    ShardableNet net;
    net.register_module("plain", torch::nn::Linear(4, 4));
    const auto refuse = [&](const ShardingPlan& plan, ErrorCode code, const std::string& what) {
      ShardingPlan with_good = plan;
      with_good.emplace("words.weight", rows);
      EXPECT_ERROR(shard_module(net, with_good, group), code, "shard a module", what);
      EXPECT_FALSE(net.words->is_sharded("weight"));
      EXPECT_EQ(net.words->weight.size(0), 11);
    };
    refuse({{"head.weights", rows}}, ErrorCode::invalid_argument,
           "has no parameter 'weights', expected one of its parameters [weight");
    refuse({{"tail.weight", rows}}, ErrorCode::invalid_argument,
           "the plan names 'tail.weight', expected a parameter of a submodule");
    refuse({{"plain.weight", rows}}, ErrorCode::invalid_argument, "'plain.weight' belongs to torch::nn::LinearImpl");
    refuse({{"head.bias", rows}}, ErrorCode::unsupported, "'bias' of a layer cannot be sharded, expected its weight");
    refuse({{"head.weight", nullptr}}, ErrorCode::invalid_argument, "the spec of 'head.weight' is null");
    refuse({{"head.weight", chunk_spec(2, {0, 1})}}, ErrorCode::invalid_argument, "ChunkShardingSpec of dimension 2");
    refuse({{"head.weight", grid_spec({4, 9}, {2, 9}, {0, 1})}}, ErrorCode::unsupported,
           "the spec of 'head.weight' is EnumerableShardingSpec, expected ChunkShardingSpec");
    refuse({{"head.weight", chunk_spec(0, {1})}}, ErrorCode::unsupported,
           "rank 0 gets 0 shards, expected one on each rank");
    refuse({{"head.weight", chunk_spec(0, {0, 1, 1})}}, ErrorCode::unsupported, "rank 1 gets 2 shards");
    EXPECT_ERROR(shard_module(net, {}, group, 2), ErrorCode::invalid_argument, "src is 2, expected 0 to 1");
    EXPECT_ERROR(shard_parameter(net, "head.weight", rows, group), ErrorCode::invalid_argument,
                 "has no parameter 'head.weight', expected one of the module itself");
    shard_parameter(*net.head, "weight", rows, group);
    refuse({{"head.weight", rows}}, ErrorCode::invalid_argument, "'head.weight' is already sharded");
    ShardedEmbedding sparse(torch::nn::EmbeddingOptions(4, 4).sparse(true));
    EXPECT_ERROR(shard_parameter(*sparse, "weight", rows, group), ErrorCode::unsupported,
                 "an embedding with scale_grad_by_freq or sparse");
    Scale on_meta(at::empty({4, 2}, at::kMeta));
    EXPECT_ERROR(shard_parameter(on_meta, "factors", rows, group), ErrorCode::invalid_argument, "'factors' is on meta");
  });
}

TEST(ShardModuleRefusalTest, ALayerWithAShardIsNotCloned) {
  run_local(2, [](const ProcessGroup& group) {
    const SpecPtr rows = chunk_spec(0, {0, 1});
    ShardedLinear linear(4, 4);
    ShardedEmbedding words(4, 4);
    ShardedEmbeddingBag bags(4, 4);
    for (torch::nn::Module* layer : std::vector<torch::nn::Module*>{linear.get(), words.get(), bags.get()}) {
      const auto copy = layer->clone();
      EXPECT_EQ(copy->name(), layer->name());
      EXPECT_TRUE(at::equal(copy->parameters()[0], layer->parameters()[0]));
      copy->parameters()[0].detach().fill_(1e9);
      EXPECT_LT(layer->parameters()[0].detach().max().item<float>(), 1e9);
      shard_parameter(*layer, "weight", rows, group);
      EXPECT_ERROR(layer->clone(), ErrorCode::unsupported, "clone of a module with sharded parameters");
    }
  });
}

TEST(LocalBatchTest, Refusals) {
  run_local(2, [](const ProcessGroup& group) {
    const ShardedTensor rows = ShardedTensor::ones(chunk_spec(0, {0, 1}), {4, 6}, group);
    EXPECT_ERROR(local_batch(rows), ErrorCode::unsupported, "expected a tensor sharded in its last dimension");
    const ShardedTensor odd = ShardedTensor::ones(chunk_spec(1, {0, 1}), {3, 6}, group);
    EXPECT_ERROR(local_batch(odd), ErrorCode::invalid_argument, "expected a multiple of 2 rows");
    EXPECT_TRUE(local_batch(PartialTensor(group, at::ones({4, 3}))).equal(at::full({2, 3}, 2.0)));
  });
}

}  // namespace
}  // namespace tessera
