// Modules that a plan shards: parameters, submodules by a sharder of the user, and results.

#include "tessera/tensor/sharded/module_sharding_plan.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "support/error_matchers.h"
#include "tensor/sharding_support.h"
#include "tessera/comm/local_ranks.h"

namespace tessera {
namespace {

using testing::chunk_spec;
using testing::close;
using testing::full_of;
using testing::leaf;
using testing::permuted_ranks;
using testing::random;
using testing::ranks_of;
using testing::shard;
using testing::SpecPtr;

// Returns a tensor that it has. PyTorch: DummyNNModule.
struct Holder : torch::nn::Module, PlannedOutput {
  Holder(const SpecPtr& spec, std::vector<std::int64_t> size, const ProcessGroup& group)
      : tensor(ShardedTensor::rand(spec, std::move(size), group)) {}
  ModuleOutput forward() { return planned_output(tensor); }
  ShardedTensor tensor;
};

// A layer whose result is sharded in its last dimension, or a sum over the ranks, as its weight is sharded.
struct PlannedLayer : torch::nn::Module, PlannedOutput {
  explicit PlannedLayer(std::int64_t in, std::int64_t out) {
    fc = register_module("fc", ShardedLinear(torch::nn::LinearOptions(in, out).bias(false)));
    fc->to(at::kDouble);
    const at::NoGradGuard no_grad;
    fc->weight.copy_(random({out, in}, 3));
  }
  ModuleOutput forward(const at::Tensor& x) {
    return planned_output(ops::linear(x, fc->sharded_parameter("weight", fc->weight), {}));
  }
  ShardedLinear fc{nullptr};
};

ShardedTensor sharded_result(const ModuleOutput& output) { return std::get<ShardedTensor>(output); }

class PlannedOutputTest : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Worlds, PlannedOutputTest, ::testing::Values(1, 2, 3));

// PyTorch: test_reshard_output.
TEST_P(PlannedOutputTest, AResultIsReshardedAsThePlanStates) {
  run_local(GetParam(), [](const ProcessGroup& group) {
    for (const std::int64_t dim : {0, 1}) {
      const SpecPtr before = chunk_spec(dim, ranks_of(group.size()));
      const SpecPtr after = chunk_spec(1 - dim, permuted_ranks(group.size()));
      Holder module(before, {24, 13}, group);
      const at::Tensor full = full_of(module.tensor);
      EXPECT_TRUE(sharded_result(module.forward()).is_same(module.tensor));
      shard_module(module, ModuleShardingPlan{.parameters = {}, .output_plan = {{"", after}}}, group);
      for (int times = 0; times < 2; ++times) {
        const ShardedTensor result = sharded_result(module.forward());
        EXPECT_TRUE(result.sharding_spec() == *after);
        EXPECT_TRUE(full_of(result).equal(full));
      }
    }
  });
}

// PyTorch: test_collect_local_shard.
TEST_P(PlannedOutputTest, ALocalTensorIsReturnedAsThePlanStates) {
  run_local(GetParam(), [](const ProcessGroup& group) {
    Holder module(chunk_spec(0, ranks_of(group.size())), {23, 15}, group);
    const at::Tensor local = module.tensor.local_tensor();
    shard_module(module, ModuleShardingPlan{.parameters = {}, .return_local_tensor = {""}}, group);
    EXPECT_TRUE(std::get<at::Tensor>(module.forward()).is_same(local));
    // A sharded dimension of size 1, as that of the ranks' batches, is dropped.
    const std::int64_t ranks = group.size();
    Holder stacked(chunk_spec(-2, ranks_of(group.size())), {3, ranks, 5}, group);
    shard_module(stacked, ModuleShardingPlan{.parameters = {}, .return_local_tensor = {""}}, group);
    EXPECT_EQ(std::get<at::Tensor>(stacked.forward()).sizes(), (std::vector<std::int64_t>{3, 5}));
  });
}

TEST_P(PlannedOutputTest, ASumOfTheRanksIsReducedToEachRanksPartWithGradients) {
  run_local(GetParam(), [](const ProcessGroup& group) {
    const std::int64_t ranks = group.size(), rows = 2 * ranks;
    const SpecPtr columns = chunk_spec(1, ranks_of(group.size())), batches = chunk_spec(0, ranks_of(group.size()));
    torch::nn::Module net;
    const auto layer = net.register_module("layer", std::make_shared<PlannedLayer>(6, 5));
    const at::Tensor all = random({rows, 6}, 4), weight = leaf(layer->fc->weight), factors = random({rows, 5}, 5);
    const at::Tensor expected = at::linear(all, weight);
    (expected * factors).sum().backward();

    shard_module(net,
                 ModuleShardingPlan{.parameters = {{"layer.fc.weight", columns}},
                                    .output_plan = {{"layer", batches}},
                                    .return_local_tensor = {"layer"}},
                 group);
    // Each rank passes its part of the batch; ops::linear stacks them.
    const std::int64_t begin = 2 * group.rank();
    const at::Tensor result = std::get<at::Tensor>(layer->forward(all.slice(0, begin, begin + 2)));
    EXPECT_TRUE(close(result.detach(), expected.detach().slice(0, begin, begin + 2)));
    (result * factors.slice(0, begin, begin + 2)).sum().backward();
    const ShardedTensor sharded = layer->fc->sharded_parameter("weight", layer->fc->weight);
    EXPECT_TRUE(close(layer->fc->weight.grad(), box_view(weight.grad(), sharded.local_shards()[0].metadata.box())));
  });
}

TEST(PlannedOutputErrorTest, ARankWithoutOneShardIsNamedToTheOthers) {
  run_local(2, [](const ProcessGroup& group) {
    Holder module(chunk_spec(0, {0}), {4, 2}, group);
    shard_module(module, ModuleShardingPlan{.parameters = {}, .return_local_tensor = {""}}, group);
    if (group.rank() == 0) {
      EXPECT_EQ(std::get<at::Tensor>(module.forward()).size(0), 4);
      EXPECT_ERROR(group.check_call("next", [](CallArguments&) {}), ErrorCode::rank_failure, "rank 1",
                   "forward of a module with a planned result");
    } else {
      EXPECT_ERROR(module.forward(), ErrorCode::unsupported, "0 shards");
    }
  });
}

// --- sharders: tables of embeddings, which PyTorch's test distributes over the ranks

struct Tables : torch::nn::Module {
  virtual at::Tensor forward(const at::Tensor& ids) = 0;
};

struct FullTables : Tables {
  explicit FullTables(int count) {
    for (int i = 0; i < count; ++i) {
      tables.push_back(register_module("table_" + std::to_string(i), ShardedEmbeddingBag(10, 8)));
      tables.back()->to(at::kDouble);
      const at::NoGradGuard no_grad;
      tables.back()->weight.copy_(random({10, 8}, static_cast<std::uint64_t>(i)));
    }
  }
  at::Tensor forward(const at::Tensor& ids) override {
    std::vector<at::Tensor> results;
    for (ShardedEmbeddingBag& table : tables) results.push_back(table(ids));
    return at::cat(results, 1);
  }
  std::vector<ShardedEmbeddingBag> tables;
};

// Shards the first tables by rows and the others by columns.
struct TablesOfRanks : Tables {
  TablesOfRanks(const FullTables& full, const ProcessGroup& group) : tables(full.tables) {
    for (std::size_t i = 0; i < tables.size(); ++i) {
      register_module("table_" + std::to_string(i), tables[i]);
      shard_parameter(*tables[i], "weight", chunk_spec(i < tables.size() / 2 ? 0 : 1, ranks_of(group.size())), group);
    }
  }
  at::Tensor forward(const at::Tensor& ids) override {
    std::vector<at::Tensor> results;
    for (ShardedEmbeddingBag& table : tables) results.push_back(table(ids));
    return at::cat(results, 1);
  }
  std::vector<ShardedEmbeddingBag> tables;
};

struct TableSharder : Sharder {
  std::shared_ptr<torch::nn::Module> shard(const std::string&, const std::shared_ptr<torch::nn::Module>& module,
                                           const ProcessGroup& group) override {
    const auto full = std::dynamic_pointer_cast<FullTables>(module);
    if (full == nullptr) fail(ErrorCode::invalid_argument, "the sharder takes FullTables alone");
    return std::make_shared<TablesOfRanks>(*full, group);
  }
};

struct Recommender : torch::nn::Module, ReplaceableSubmodules {
  Recommender() {
    tables = register_module("tables", std::make_shared<FullTables>(6));
    register_module("head", ShardedLinear(4, 4));
  }
  void replace_submodule(const std::string& name, const std::shared_ptr<torch::nn::Module>& module) override {
    tables = std::dynamic_pointer_cast<Tables>(module);
    if (name != "tables" || !tables) fail(ErrorCode::invalid_argument, "'{}' must be Tables", name);
    replace_module(name, module);
  }
  std::shared_ptr<Tables> tables;
};

// PyTorch: test_custom_sharder.
TEST(SharderTest, AModuleOfItsOwnTakesThePlaceOfTheOneItWasGiven) {
  for (const int ranks : {1, 2, 3}) {
    run_local(ranks, [](const ProcessGroup& group) {
      Recommender model;
      const at::Tensor ids = at::arange(8).view({2, 4}).add(group.rank()).remainder(10);
      const at::Tensor expected = model.tables->forward(ids).detach();
      shard_module(model,
                   ModuleShardingPlan{.parameters = {{"head.weight", chunk_spec(0, ranks_of(group.size()))}},
                                      .sharders = {{"tables", std::make_shared<TableSharder>()}}},
                   group);
      const auto tables = std::dynamic_pointer_cast<TablesOfRanks>(model.tables);
      ASSERT_NE(tables, nullptr);
      EXPECT_TRUE(tables->tables[0]->is_sharded("weight"));
      EXPECT_EQ(tables->tables[5]->weight.size(0), 10);  // by columns
      EXPECT_EQ(named_sharded_parameters(model).size(), 7u);
      EXPECT_TRUE(at::allclose(model.tables->forward(ids), expected));
    });
  }
}

// A sharder that returns a new module, in which there is one that the module before it did not have.
struct ReplacingSharder : Sharder {
  std::shared_ptr<torch::nn::Module> shard(const std::string&, const std::shared_ptr<torch::nn::Module>&,
                                           const ProcessGroup& group) override {
    const SpecPtr rows = chunk_spec(0, ranks_of(group.size()));
    const auto made = std::make_shared<Holder>(rows, std::vector<std::int64_t>{6, 12}, group);
    made->register_module("inner", std::make_shared<Holder>(rows, std::vector<std::int64_t>{6, 12}, group));
    return made;
  }
};

struct HolderOfOne : torch::nn::Module, ReplaceableSubmodules {
  explicit HolderOfOne(const ProcessGroup& group) {
    held = register_module("held", std::make_shared<Holder>(chunk_spec(0, ranks_of(group.size())),
                                                            std::vector<std::int64_t>{6, 12}, group));
  }
  void replace_submodule(const std::string& name, const std::shared_ptr<torch::nn::Module>& module) override {
    held = std::dynamic_pointer_cast<Holder>(module);
    replace_module(name, module);
  }
  std::shared_ptr<Holder> held;
};

TEST(SharderTest, TheResultOfTheModuleThatItReturnsIsPlanned) {
  for (const int ranks : {1, 2, 3}) {
    run_local(ranks, [](const ProcessGroup& group) {
      HolderOfOne model(group);
      const std::weak_ptr<Holder> given = model.held;
      const SpecPtr columns = chunk_spec(1, ranks_of(group.size()));
      shard_module(model,
                   ModuleShardingPlan{.parameters = {},
                                      .sharders = {{"held", std::make_shared<ReplacingSharder>()}},
                                      .output_plan = {{"held", columns}, {"held.inner", columns}},
                                      .return_local_tensor = {"held.inner"}},
                   group);
      EXPECT_TRUE(given.expired());
      EXPECT_TRUE(sharded_result(model.held->forward()).sharding_spec() == *columns);
      const auto inner = std::dynamic_pointer_cast<Holder>(model.held->named_children()["inner"]);
      ASSERT_NE(inner, nullptr);
      EXPECT_EQ(std::get<at::Tensor>(inner->forward()).sizes(), (std::vector<std::int64_t>{6, 12 / group.size()}));
    });
  }
}

TEST(SharderTest, AModuleThatItReturnsWhoseResultCannotBePlannedIsRefusedOnAllRanks) {
  run_local(2, [](const ProcessGroup& group) {
    const auto refuse = [&](ModuleShardingPlan plan, const std::string& what) {
      Recommender model;
      plan.sharders["tables"] = std::make_shared<TableSharder>();
      EXPECT_ERROR(shard_module(model, plan, group), ErrorCode::invalid_argument, "plan the results of a module", what);
      EXPECT_NE(std::dynamic_pointer_cast<TablesOfRanks>(model.tables), nullptr);
    };
    refuse({.parameters = {}, .output_plan = {{"tables", chunk_spec(0, {0, 1})}}}, "expected one of PlannedOutput");
    refuse({.parameters = {}, .return_local_tensor = {"tables.none"}},
           "return_local_tensor of the plan names 'tables.none'");
  });
}

// A sharder whose module stays where it is, and one that fails on one rank.
struct InPlace : Sharder {
  explicit InPlace(int fails_on = -1) : fails_on_(fails_on) {}
  std::shared_ptr<torch::nn::Module> shard(const std::string& name, const std::shared_ptr<torch::nn::Module>& module,
                                           const ProcessGroup& group) override {
    EXPECT_EQ(name, "inner.layer");
    if (group.rank() == fails_on_) fail(ErrorCode::io, "no such table");
    shard_parameter(*module, "weight", chunk_spec(1, ranks_of(group.size())), group);
    return module;
  }
  int fails_on_;
};

struct Nested : torch::nn::Module {
  Nested() {
    const auto inner = register_module("inner", std::make_shared<torch::nn::Module>());
    layer = inner->register_module("layer", ShardedLinear(4, 6));
  }
  ShardedLinear layer{nullptr};
};

TEST(SharderTest, ShardsASubmoduleOfAnyDepthInPlace) {
  run_local(2, [](const ProcessGroup& group) {
    Nested model;
    shard_module(
        model, ModuleShardingPlan{.parameters = {}, .sharders = {{"inner.layer", std::make_shared<InPlace>()}}}, group);
    EXPECT_EQ(model.layer->weight.sizes(), (std::vector<std::int64_t>{6, 2}));
  });
}

TEST(SharderTest, IfOneThrowsOnARankEveryRankThrows) {
  for (const int wrong : {0, 1}) {
    run_local(2, [&](const ProcessGroup& group) {
      Nested model;
      const ModuleShardingPlan plan{.parameters = {}, .sharders = {{"inner.layer", std::make_shared<InPlace>(wrong)}}};
      if (group.rank() == wrong) {
        EXPECT_ERROR(shard_module(model, plan, group), ErrorCode::io, "no such table");
      } else {
        EXPECT_ERROR(shard_module(model, plan, group), ErrorCode::rank_failure, "rank " + std::to_string(wrong),
                     "no such table");
      }
    });
  }
}

// PyTorch: test_custom_sharder_errors, test_sharding_plan_errors.
TEST(ModuleShardingPlanTest, EveryRankThrowsBeforeAnythingChanges) {
  run_local(2, [](const ProcessGroup& group) {
    const SpecPtr rows = chunk_spec(0, {0, 1});
    Recommender model;
    const auto holder =
        model.register_module("holder", std::make_shared<Holder>(rows, std::vector<std::int64_t>{4, 4}, group));
    model.register_module("again", holder);
    const auto sharder = std::make_shared<TableSharder>();
    const auto refuse = [&](ModuleShardingPlan plan, const std::string& what) {
      plan.parameters.emplace("head.weight", rows);
      EXPECT_ERROR(shard_module(model, plan, group), ErrorCode::invalid_argument, "shard a module by a plan", what);
      EXPECT_TRUE(named_sharded_parameters(model).empty());
      EXPECT_FALSE(holder->has_output_plan());
    };
    refuse({.parameters = {}, .sharders = {{"", sharder}}}, "a sharder of the plan has the name ''");
    refuse({.parameters = {{"tables.table_0.weight", rows}}, .sharders = {{"tables", sharder}}},
           "the plan has a spec for 'tables.table_0.weight' and a sharder for 'tables'");
    refuse({.parameters = {}, .sharders = {{"tables", nullptr}}}, "the sharder of 'tables' is null");
    refuse({.parameters = {}, .sharders = {{"tables.none", sharder}}}, "sharders of the plan names 'tables.none'");
    refuse({.parameters = {}, .output_plan = {{"holder", nullptr}}}, "the output_plan of 'holder' is null");
    refuse({.parameters = {}, .output_plan = {{"holders", rows}}}, "output_plan of the plan names 'holders'");
    refuse({.parameters = {}, .output_plan = {{"head", rows}}},
           "which is tessera::ShardedLinearImpl, expected one of PlannedOutput");
    refuse({.parameters = {}, .output_plan = {{"holder", rows}, {"again", rows}}}, "two names of the module 'holder'");
    refuse({.parameters = {}, .return_local_tensor = {"head"}}, "return_local_tensor of the plan names 'head'");
    refuse({.parameters = {}, .return_local_tensor = {"nothing"}}, "return_local_tensor of the plan names 'nothing'");
    shard_module(model, ModuleShardingPlan{.parameters = {}, .output_plan = {{"holder", rows}}}, group);
    EXPECT_ERROR(shard_module(model, ModuleShardingPlan{.parameters = {}, .return_local_tensor = {"again"}}, group),
                 ErrorCode::invalid_argument, "whose result has a plan already, expected a module without one");
    // A parent that cannot replace a submodule.
    torch::nn::Module parent;
    parent.register_module("tables", std::make_shared<FullTables>(2));
    EXPECT_ERROR(shard_module(parent, ModuleShardingPlan{.parameters = {}, .sharders = {{"tables", sharder}}}, group),
                 ErrorCode::invalid_argument, "is not a ReplaceableSubmodules, expected the same module or ");
  });
}

}  // namespace
}  // namespace tessera
