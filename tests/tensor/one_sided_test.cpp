// What is wrong on one rank in a collective of tensors is an error on all of them.

#include "support/one_sided.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "support/error_matchers.h"
#include "tensor/mesh_support.h"
#include "tensor/sharding_support.h"
#include "tessera/comm/functional.h"
#include "tessera/tensor/dtensor/pending_dtensor.h"
#include "tessera/tensor/dtensor_ops.h"
#include "tessera/tensor/ops.h"
#include "tessera/tensor/parallel/distribute_module.h"
#include "tessera/tensor/partial_tensor.h"
#include "tessera/tensor/shard_module.h"
#include "tessera/tensor/sharded/module_sharding_plan.h"
#include "tessera/tensor/tensor_parallel.h"

namespace tessera {
namespace {

using testing::chunk_spec;
using testing::expect_error_soon;
using testing::expect_usable;
using testing::OneSidedCall;
using testing::quick;
using testing::ranks_of;
using testing::Sizes;
using testing::SpecPtr;

const Placement kReplicate = Placement::replicate();
const Placement kPartial = Placement::partial(ReduceOp::sum);

std::vector<OneSidedCall> mesh_calls(const ProcessGroup& group) {
  const std::int64_t n = group.size();
  const DeviceMesh cube(group, {n, 1, 1}, {"a", "b", "c"});
  const ProcessGroup all = *group.subgroup(ranks_of(group.size())), twin = *group.subgroup(ranks_of(group.size()));
  const ProcessGroup alone = cube.group("b");
  return {
      {"subgroup",
       {"another order", "no rank", "a rank twice", "a rank too high"},
       [](const ProcessGroup& g, const std::string& mistake) {
         std::vector<int> ranks = ranks_of(g.size());
         if (mistake == "another order") std::swap(ranks[0], ranks[1]);
         if (mistake == "no rank") ranks.clear();
         if (mistake == "a rank twice") ranks[1] = 0;
         if (mistake == "a rank too high") ranks[1] = g.size();
         g.subgroup(ranks);
       }},
      {"make a device mesh",
       {"another shape", "a shape that does not fit", "another name", "a name too many", "another device",
        "another order"},
       [n](const ProcessGroup& g, const std::string& mistake) {
         Sizes shape = {n};
         std::vector<std::string> names = {mistake == "another name" ? "dp" : "tp"};
         if (mistake == "another shape") shape = {1, n}, names = {"a", "b"};
         if (mistake == "a shape that does not fit") shape = {n + 1};
         if (mistake == "a name too many") names.emplace_back("b");
         std::vector<int> ranks = ranks_of(g.size());
         if (mistake == "another order") std::swap(ranks[0], ranks[1]);
         DeviceMesh::of_ranks(g, shape, ranks, names,
                              mistake == "another device" ? c10::DeviceType::CUDA : c10::DeviceType::CPU);
       }},
      {"make a device mesh",
       {"another name", "a name too many", "another device"},
       [](const ProcessGroup& g, const std::string& mistake) {
         std::vector<std::string> names = {mistake == "another name" ? "dp" : "tp"};
         if (mistake == "a name too many") names.emplace_back("b");
         DeviceMesh::from_group(g, names, mistake == "another device" ? c10::DeviceType::CUDA : c10::DeviceType::CPU);
       }},
      {"make a device mesh from groups",
       {"another shape", "a shape that does not fit", "another order", "another name", "no names", "another device",
        "no groups", "a group too many", "groups of other dimensions", "another group of the same ranks"},
       [=](const ProcessGroup& g, const std::string& mistake) {
         Sizes shape = {n, 1};
         std::vector<int> ranks = ranks_of(g.size());
         std::vector<std::string> names = {mistake == "another name" ? "pp" : "dp", "tp"};
         std::vector<ProcessGroup> groups = {all, alone};
         if (mistake == "another shape") shape = {1, n};
         if (mistake == "a shape that does not fit") shape = {n, 2};
         if (mistake == "another order") std::swap(ranks[0], ranks[1]);
         if (mistake == "no names") names.clear();
         if (mistake == "no groups") groups.clear();
         if (mistake == "a group too many") groups.push_back(alone);
         if (mistake == "groups of other dimensions") std::swap(groups[0], groups[1]);
         if (mistake == "another group of the same ranks") groups[0] = twin;
         DeviceMesh::from_groups(g, groups, shape, ranks, names,
                                 mistake == "another device" ? c10::DeviceType::CUDA : c10::DeviceType::CPU);
       }},
      {"make a sub-mesh",
       {"other dimensions", "an unknown name", "another order"},
       [cube](const ProcessGroup&, const std::string& mistake) {
         if (mistake == "other dimensions") return static_cast<void>(cube.submesh({"b", "c"}));
         if (mistake == "an unknown name") return static_cast<void>(cube.submesh({"a", "x"}));
         if (mistake == "another order") return static_cast<void>(cube.submesh({"b", "a"}));
         cube.submesh({"a", "b"});
       }},
  };
}

struct Mlp : torch::nn::Module {
  explicit Mlp(std::int64_t width) {
    up = register_module("up", ParallelLinear(4, width));
    down = register_module("down", ParallelLinear(width, 4));
  }
  ParallelLinear up{nullptr}, down{nullptr};
};

std::vector<OneSidedCall> dtensor_calls(const ProcessGroup& group) {
  const DeviceMesh mesh(group, {group.size()});
  const auto distributed = [mesh](const std::string& mistake) {
    const auto dtype = mistake == "another dtype" ? at::kFloat : at::kDouble;
    const Sizes size = mistake == "another size" ? Sizes{6, 4} : Sizes{4, 6};
    const MeshLayout layout(size, mesh.shape(), {Placement::shard(0)});
    at::Tensor local = at::ones(layout.local_shape(*mesh.coordinate()).sizes, at::kDouble).to(dtype);
    if (mistake == "a tensor on meta") local = local.to(at::kMeta);
    return DTensor(mesh, layout, local.set_requires_grad(mistake == "another requires_grad"));
  };
  const auto placements_of = [](const std::string& mistake) -> Placements {
    if (mistake == "other placements") return {Placement::shard(1)};
    if (mistake == "a dimension too high") return {Placement::shard(2)};
    if (mistake == "placements too many") return {kReplicate, kReplicate};
    return {kReplicate};
  };
  const std::vector<std::string> of_placements = {"other placements", "a dimension too high", "placements too many"};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.end(), of_placements.begin(), of_placements.end());
    return more;
  };
  return {
      {"distribute a tensor",
       with({"another dtype", "another size", "an undefined tensor", "a partial placement", "a tensor on meta",
             "another requires_grad"}),
       [=](const ProcessGroup&, const std::string& mistake) {
         at::Tensor full = at::ones(mistake == "another size" ? Sizes{6, 4} : Sizes{4, 6});
         if (mistake == "another dtype") full = full.to(at::kDouble);
         if (mistake == "a tensor on meta") full = full.to(at::kMeta);
         if (mistake == "another requires_grad") full.set_requires_grad(true);
         if (mistake == "an undefined tensor") full = at::Tensor();
         distribute_tensor(full, mesh,
                           mistake == "a partial placement" ? Placements{kPartial} : placements_of(mistake));
       }},
      {"redistribute", with({"another dtype", "another size", "a tensor on meta", "another requires_grad"}),
       [=](const ProcessGroup&, const std::string& mistake) {
         distributed(mistake).redistribute(placements_of(mistake));
       }},
      {"start_redistribute", with({"another dtype", "another size", "a tensor on meta", "another requires_grad"}),
       [=](const ProcessGroup&, const std::string& mistake) {
         start_redistribute(distributed(mistake), placements_of(mistake)).wait();
       }},
      {"full tensor", with({"another dtype", "another size"}),
       [=](const ProcessGroup&, const std::string& mistake) {
         const DTensor tensor = distributed(mistake);
         tensor.full_tensor(placements_of(mistake));
       }},
      {"redistribute", with({"no local shards but a tensor"}),
       [=](const ProcessGroup& g, const std::string& mistake) {
         if (mistake == "no local shards but a tensor") {
           distributed("").redistribute({kReplicate});
           return;
         }
         const LocalShardsWrapper local({at::ones({1, 6})}, {{g.rank(), 0}});
         DTensor::from_local(local, mesh, {Placement::shard(0)}, {g.size(), 6}).redistribute(placements_of(mistake));
       }},
      {"local shards",
       {"shards of another dtype"},
       [=](const ProcessGroup& g, const std::string& mistake) {
         const LocalShardsWrapper local({at::ones({1, 6}, mistake.empty() ? at::kFloat : at::kDouble)},
                                        {{g.rank(), 0}});
         DTensor::from_local(local, mesh, {Placement::shard(0)}, {g.size(), 6}).redistribute({kReplicate});
       }},
      {"check local tensors",
       with({"another dtype", "another size", "a size that does not fit", "an undefined tensor", "a tensor on meta",
             "another requires_grad"}),
       [=](const ProcessGroup&, const std::string& mistake) {
         at::Tensor local = at::ones(mistake == "another size" ? Sizes{3, 2} : Sizes{2, 3},
                                     mistake == "another dtype" ? at::kDouble : at::kFloat);
         if (mistake == "a tensor on meta") local = local.to(at::kMeta);
         if (mistake == "another requires_grad") local.set_requires_grad(true);
         if (mistake == "an undefined tensor") local = at::Tensor();
         FromLocalOptions options;
         options.run_check = true;
         if (mistake == "a size that does not fit") options.size = Sizes{9, 9};
         DTensor::from_local(local, mesh, placements_of(mistake), options);
       }},
      {"equal of DTensors",
       {"another dtype", "another size", "local shards"},
       [=](const ProcessGroup& g, const std::string& mistake) {
         const LocalShardsWrapper local({at::ones({1, 6})}, {{g.rank(), 0}});
         const DTensor shards = DTensor::from_local(local, mesh, {Placement::shard(0)}, {g.size(), 6});
         dtensor::equal(distributed(mistake), mistake == "local shards" ? shards : distributed(""));
       }},
      {"all_gather_into_tensor of local shards",
       {"no shard", "longer rows", "another dtype"},
       [](const ProcessGroup& g, const std::string& mistake) {
         if (mistake == "no shard")
           return static_cast<void>(LocalShardsWrapper({}, {}).all_gather_into_tensor(g).wait());
         const at::Tensor shard = at::ones(mistake == "longer rows" ? Sizes{2, 6} : Sizes{3, 4},
                                           mistake == "another dtype" ? at::kDouble : at::kFloat);
         LocalShardsWrapper({shard}, {{0, 0}}).all_gather_into_tensor(g).wait();
       }},
      {"parallelize a module",
       {"another style", "a module less", "an unknown module", "another width", "another dtype", "a partial layout"},
       [=](const ProcessGroup&, const std::string& mistake) {
         Mlp mlp(mistake == "another width" ? 16 : 8);
         if (mistake == "another dtype") mlp.to(at::kDouble);
         ParallelPlan plan = {{"up", ColwiseParallel{}}, {"down", RowwiseParallel{}}};
         if (mistake == "another style") plan[0].second = RowwiseParallel{kReplicate};
         if (mistake == "a module less") plan.pop_back();
         if (mistake == "an unknown module") plan[0].first = "side";
         if (mistake == "a partial layout") plan[0].second = ColwiseParallel{kReplicate, kPartial};
         parallelize_module(mlp, mesh, plan);
       }},
  };
}

std::vector<OneSidedCall> sharded_calls(const ProcessGroup& group) {
  const std::vector<int> ranks = ranks_of(group.size());
  const SpecPtr rows = chunk_spec(0, ranks), columns = chunk_spec(1, ranks);
  const auto spec_of = [=](const std::string& mistake) {
    return mistake == "a null spec" ? nullptr : mistake == "another spec" ? columns : rows;
  };
  const auto tensor_of = [=](const ProcessGroup& g, const std::string& mistake) {
    const Sizes size = mistake == "another size" ? Sizes{12, 5} : Sizes{12, 4};
    return testing::shard(testing::indices(size, mistake == "another dtype" ? at::kDouble : at::kFloat), rows, g);
  };
  return {
      {"gather of a sharded tensor",
       {"another root", "a root too high", "another size", "another dtype", "another out", "out of another dtype",
        "a gathered dtype", "a gathered dtype without a conversion"},
       [=](const ProcessGroup& g, const std::string& mistake) {
         const int root = mistake == "another root" ? 1 : mistake == "a root too high" ? g.size() : 0;
         at::Tensor out = g.rank() == 0 ? at::empty({12, 4}) : at::Tensor();
         if (mistake == "another out") out = out.defined() ? at::Tensor() : at::empty({12, 4});
         if (mistake == "out of another dtype") out = at::empty({12, 4}, at::kDouble);
         std::optional<at::ScalarType> dtype;
         if (mistake == "a gathered dtype") dtype = at::kDouble;
         if (mistake == "a gathered dtype without a conversion") dtype = at::kQInt8;
         tensor_of(g, mistake).gather(root, out, dtype);
       }},
      {"gather of a sharded tensor",
       {"no gathered dtype", "a real out", "a real gathered dtype"},
       [=](const ProcessGroup& g, const std::string& mistake) {
         const ShardedTensor tensor = testing::shard(testing::indices({12, 4}, at::kComplexFloat), rows, g);
         at::Tensor out = g.rank() == 0 ? at::empty({12, 4}, at::kComplexFloat) : at::Tensor();
         std::optional<at::ScalarType> dtype = at::kComplexDouble;
         if (mistake == "no gathered dtype") dtype.reset();
         if (mistake == "a real gathered dtype") dtype = at::kFloat;
         if (mistake == "a real out") out = at::empty({12, 4});
         tensor.gather(0, out, dtype);
       }},
      {"reshard a sharded tensor",
       {"a null spec", "another spec", "another size", "another dtype"},
       [=](const ProcessGroup& g, const std::string& mistake) { tensor_of(g, mistake).reshard(spec_of(mistake)); }},
      {"sharded tensor from the tensor of one rank",
       {"a null spec", "another spec", "another src", "a src too high"},
       [=](const ProcessGroup& g, const std::string& mistake) {
         const int src = mistake == "another src" ? 1 : mistake == "a src too high" ? g.size() : 0;
         ShardedTensor::from_tensor(at::ones({12, 4}), spec_of(mistake), g, src);
       }},
      {"sharded tensor from local shards",
       {"an undefined shard", "a shard of another rank", "another dtype", "another size"},
       [](const ProcessGroup& g, const std::string& mistake) {
         const int other = (g.rank() + 1) % g.size();
         const at::Tensor tensor = at::ones({1, 4}, mistake == "another dtype" ? at::kDouble : at::kFloat);
         Shard shard = Shard::from_tensor_and_offsets(tensor, {g.rank(), 0},
                                                      mistake == "a shard of another rank" ? other : g.rank());
         if (mistake == "an undefined shard") shard.tensor = at::Tensor();
         ShardedTensor::from_local_shards({shard}, {g.size() + (mistake == "another size" ? 1 : 0), 4}, g);
       }},
      {"sharded tensor from its state",
       {"another size", "another dtype", "a null spec", "no shard", "another rank"},
       [=](const ProcessGroup& g, const std::string& mistake) {
         ShardedTensorState state = tensor_of(g, mistake).state();
         if (mistake == "a null spec") state.sharding_spec = nullptr;
         if (mistake == "no shard") state.local_shards.clear();
         if (mistake == "another rank") state.process_group.rank += 1;
         ShardedTensor::from_state(std::move(state), g);
       }},
      {"compare sharded tensors",
       {"another size", "another dtype"},
       [=](const ProcessGroup& g, const std::string& mistake) {
         ops::equal(tensor_of(g, mistake), tensor_of(g, mistake));
       }},
      {"reshard a partial tensor",
       {"a null spec", "another spec", "another kind of spec", "another size", "another dtype", "an undefined tensor"},
       [=](const ProcessGroup& g, const std::string& mistake) {
         at::Tensor local = at::ones(mistake == "another size" ? Sizes{12, 8} : Sizes{8, 12},
                                     mistake == "another dtype" ? at::kDouble : at::kFloat);
         if (mistake == "an undefined tensor") local = at::Tensor();
         const bool is_grid = mistake == "another kind of spec";
         PartialTensor(g, local).reshard(is_grid ? testing::grid_spec({8, 12}, {4, 12}, {0, 1}) : spec_of(mistake));
       }},
      {"functional::all_reduce",
       {"another size", "another dtype", "an undefined tensor", "a tensor on meta"},
       [](const ProcessGroup& g, const std::string& mistake) {
         at::Tensor local = at::ones(mistake == "another size" ? Sizes{3, 2} : Sizes{2, 3},
                                     mistake == "another dtype" ? at::kDouble : at::kFloat);
         if (mistake == "an undefined tensor") local = at::Tensor();
         if (mistake == "a tensor on meta") local = local.to(at::kMeta);
         PartialTensor(g, local).all_reduce();
       }},
      {"functional::all_reduce_coalesced",
       {"another size", "another dtype", "two dtypes", "an undefined tensor", "a tensor on meta", "a tensor less"},
       [](const ProcessGroup& g, const std::string& mistake) {
         const at::ScalarType dtype = mistake == "another dtype" ? at::kDouble : at::kFloat;
         std::vector<at::Tensor> locals = {at::ones(mistake == "another size" ? Sizes{3, 2} : Sizes{2, 3}, dtype),
                                           at::ones({4}, mistake == "two dtypes" ? at::kDouble : dtype)};
         if (mistake == "an undefined tensor") locals[1] = at::Tensor();
         if (mistake == "a tensor on meta") locals[1] = locals[1].to(at::kMeta);
         if (mistake == "a tensor less") locals.pop_back();
         functional::all_reduce_coalesced(g, locals);
       }},
      {"functional::all_gather",
       {"another size", "another dtype", "a scalar"},
       [](const ProcessGroup& g, const std::string& mistake) {
         const at::Tensor local = at::ones(mistake == "another size" ? Sizes{3, 2} : Sizes{2, 3},
                                           mistake == "another dtype" ? at::kDouble : at::kFloat);
         functional::all_gather(g, mistake == "a scalar" ? at::ones({}) : local);
       }},
      {"functional::reduce_scatter",
       {"another size", "rows that do not fit"},
       [](const ProcessGroup& g, const std::string& mistake) {
         const std::int64_t more = mistake.empty() ? 0 : mistake == "another size" ? g.size() : 1;
         functional::reduce_scatter(g, at::ones({2 * g.size() + more, 3}));
       }},
      {"op 'linear'",
       {"another size", "another dtype", "inputs that do not fit"},
       [=](const ProcessGroup& g, const std::string& mistake) {
         const at::Tensor input =
             at::ones({mistake == "another size" ? 3 : 2, mistake == "inputs that do not fit" ? 5 : 4},
                      mistake == "another dtype" ? at::kDouble : at::kFloat);
         ops::linear(input, tensor_of(g, ""), {});
       }},
      {"op 'embedding'",
       {"another size", "an undefined tensor", "a row that is not there", "sparse", "no maximal norm",
        "a negative maximal norm", "another padding_idx"},
       [=](const ProcessGroup& g, const std::string& mistake) {
         at::Tensor ids = at::zeros({mistake == "another size" ? 3 : 2}, at::kLong);
         if (mistake == "an undefined tensor") ids = at::Tensor();
         if (mistake == "a row that is not there") ids.fill_(1000);
         ops::EmbeddingOptions options;
         options.sparse = mistake == "sparse";
         if (mistake != "no maximal norm") options.max_norm = mistake == "a negative maximal norm" ? -1 : 5;
         if (mistake == "another padding_idx") options.padding_idx = 1;
         ops::embedding(ids, tensor_of(g, ""), options);
       }},
      {"op 'embedding_bag'",
       {"another size", "another mode", "an unknown mode", "weights", "offsets", "sparse"},
       [=](const ProcessGroup& g, const std::string& mistake) {
         const at::Tensor ids = at::zeros({mistake == "another size" ? 3 : 2, 2}, at::kLong);
         ops::EmbeddingBagOptions options;
         options.mode = mistake == "another mode" ? "mean" : mistake == "an unknown mode" ? "median" : "sum";
         if (mistake == "weights") options.per_sample_weights = at::ones({2, 2});
         if (mistake == "offsets") options.offsets = at::zeros({1}, at::kLong);
         options.sparse = mistake == "sparse";
         ops::embedding_bag(ids, tensor_of(g, ""), options);
       }},
  };
}

struct Weighted : torch::nn::Module, ShardedParameters {
  explicit Weighted(const std::string& mistake) {
    at::TensorOptions options(mistake == "another dtype" ? at::kDouble : at::kFloat);
    if (mistake == "a tensor on meta") options = options.device(at::kMeta);
    register_parameter("weight", at::ones({mistake == "another size" ? 5 : 6, 4}, options),
                       mistake != "another requires_grad");
    register_parameter("bias", at::ones({6}));
  }
};

struct PlannedRoot : torch::nn::Module, PlannedOutput {};

std::vector<OneSidedCall> shard_module_calls(const ProcessGroup& group) {
  const SpecPtr rows = chunk_spec(0, ranks_of(group.size())), columns = chunk_spec(1, ranks_of(group.size()));
  const std::vector<std::string> of_parameter = {"a null spec",       "another spec",          "a spec of one rank",
                                                 "another src",       "a src too high",        "another size",
                                                 "another dtype",     "another requires_grad", "a tensor on meta",
                                                 "another parameter", "no parameter",          "a sharded parameter"};
  const auto name_of = [](const std::string& mistake) -> std::string {
    return mistake == "another parameter" ? "bias" : mistake == "no parameter" ? "weights" : "weight";
  };
  const auto spec_of = [=](const std::string& mistake) -> SpecPtr {
    if (mistake == "a null spec") return nullptr;
    if (mistake == "a spec of one rank") return chunk_spec(0, {0});
    return mistake == "another spec" ? columns : rows;
  };
  const auto src_of = [](const ProcessGroup& g, const std::string& mistake) {
    return mistake == "another src" ? 1 : mistake == "a src too high" ? g.size() : 0;
  };
  ShardedLinear sharded(4, 6);
  shard_parameter(*sharded, "weight", rows, group);
  return {
      {"shard a parameter", of_parameter,
       [=](const ProcessGroup& g, const std::string& mistake) {
         ShardedLinear already = sharded;
         Weighted own(mistake);
         torch::nn::Module& module = mistake == "a sharded parameter" ? static_cast<torch::nn::Module&>(*already) : own;
         shard_parameter(module, name_of(mistake), spec_of(mistake), g, src_of(g, mistake));
       }},
      {"shard a module",
       {"a null spec", "another spec", "another src", "another size", "no parameter", "a plan with more",
        "a module of LibTorch"},
       [=](const ProcessGroup& g, const std::string& mistake) {
         torch::nn::Sequential module(ShardedLinear(4, mistake == "another size" ? 5 : 6), ShardedLinear(4, 6),
                                      torch::nn::Linear(4, 6));
         ShardingPlan plan = {{"0." + name_of(mistake), spec_of(mistake)}};
         if (mistake == "a plan with more") plan["1.weight"] = rows;
         if (mistake == "a module of LibTorch") plan["2.weight"] = rows;
         shard_module(*module, plan, g, src_of(g, mistake));
       }},
      {"shard a module by a plan",
       {"a null spec", "another spec", "another src", "no local tensor", "no module", "a null sharder"},
       [=](const ProcessGroup& g, const std::string& mistake) {
         PlannedRoot module;
         ModuleShardingPlan plan;
         plan.output_plan[mistake == "no module" ? "0" : ""] = spec_of(mistake);
         if (mistake != "no local tensor") plan.return_local_tensor = {""};
         if (mistake == "a null sharder") plan.sharders["layer"] = nullptr;
         shard_module(module, plan, g, src_of(g, mistake));
       }},
      {"op 'linear'",
       {"another size", "another dtype", "inputs that do not fit"},
       [=](const ProcessGroup&, const std::string& mistake) {
         ShardedLinear layer = sharded;
         layer(at::ones({mistake == "another size" ? 3 : 2, mistake == "inputs that do not fit" ? 5 : 4},
                        mistake == "another dtype" ? at::kDouble : at::kFloat));
       }},
  };
}

std::vector<OneSidedCall> all_calls(const ProcessGroup& group) {
  std::vector<OneSidedCall> calls = mesh_calls(group);
  for (const auto& more : {dtensor_calls(group), sharded_calls(group), shard_module_calls(group)}) {
    calls.insert(calls.end(), more.begin(), more.end());
  }
  return calls;
}

class OneSidedTensorTest : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Worlds, OneSidedTensorTest, ::testing::Values(2, 3, 4));

TEST_P(OneSidedTensorTest, AMistakeIsAnErrorOnAllRanksAsThreads) {
  testing::make_mistakes_as_threads(GetParam(), all_calls);
}

TEST_P(OneSidedTensorTest, AMistakeIsAnErrorOnAllRanksAsProcesses) {
  testing::make_mistakes_as_processes(GetParam(), all_calls);
}

// Without init_rrefs, `zeros` is not a collective: the ranks that do not ask for it find out in their next call.
TEST(OneSidedRrefsTest, InitRrefsOnOneRankIsAnErrorOnAll) {
  for (const int world : {2, 3}) {
    run_local(world, [&](const ProcessGroup& group) {
      for (int wrong = 0; wrong < world; ++wrong) {
        expect_error_soon(
            [&] {
              ShardedTensorOptions options;
              options.init_rrefs = group.rank() == wrong;
              ShardedTensor::zeros(chunk_spec(0, ranks_of(world)), {6, 2}, group, options);
              group.barrier();
            },
            {"init_rrefs", "rank " + std::to_string(wrong)});
        expect_usable(group);
      }
    });
  }
}

// --- ops and parallel layers do not compare: they are parts of training steps

using Step = std::function<void(const DeviceMesh& mesh, bool is_wrong)>;

const std::vector<std::pair<std::string, Step>>& steps() {
  static const std::vector<std::pair<std::string, Step>> all = {
      {"op 'matmul' on DTensors",
       [](const DeviceMesh& mesh, bool is_wrong) {
         const MeshLayout layout({4, 4}, mesh.shape(), {kPartial});
         const DTensor a(mesh, layout, at::ones({4, 4}));
         const MeshLayout of_b({is_wrong ? 5 : 4, 4}, mesh.shape(), {kReplicate});
         dtensor::matmul(dtensor::relu(a), DTensor(mesh, of_b, at::ones({is_wrong ? 5 : 4, 4})));
       }},
      {"forward of a parallel layer",
       [](const DeviceMesh& mesh, bool is_wrong) {
         ParallelLayerNorm norm(torch::nn::LayerNormOptions({4}));
         parallelize_module(*norm, mesh, {{"", SequenceParallel{1}}});
         norm(at::ones(is_wrong ? Sizes{4} : Sizes{2, 3, 4}));
       }},
      {"forward of a layer with a sharded weight",
       [](const DeviceMesh& mesh, bool is_wrong) {
         const ProcessGroup& group = mesh.group(0);
         ShardedLinear layer(4, 6);
         shard_parameter(*layer, "weight", chunk_spec(0, ranks_of(group.size())), group);
         if (is_wrong) layer->weight.set_data(at::ones({5, 5}));
         layer(at::ones({2, 4}));
       }},
      {"op 'softmax'",
       [](const DeviceMesh& mesh, bool is_wrong) {
         const ProcessGroup& group = mesh.group(0);
         ops::softmax(ShardedTensor::zeros(chunk_spec(0, ranks_of(group.size())), {6, 2}, group), is_wrong ? 2 : 0);
       }},
      {"op 'layer_norm'",
       [](const DeviceMesh& mesh, bool is_wrong) {
         const ProcessGroup& group = mesh.group(0);
         const Sizes shape = is_wrong ? Sizes{3} : Sizes{6, 2};
         ops::layer_norm(ShardedTensor::zeros(chunk_spec(0, ranks_of(group.size())), {6, 2}, group), shape, {});
       }},
  };
  return all;
}

// Returns the error of a barrier after a step that one rank makes wrongly, or of the step.
void after_step(const ProcessGroup& group, const Step& step, int wrong) {
  const DeviceMesh mesh(group, {group.size()});
  try {
    step(mesh, group.rank() == wrong);
  } catch (const std::exception&) {
    if (group.rank() != wrong) throw;
  }
  group.barrier();
}

TEST(OneSidedTensorStepTest, ARankThatLeavesAStepIsNamedToAllAsThreads) {
  for (const auto& [operation, step] : steps()) {
    for (int wrong = 0; wrong < 3; ++wrong) {
      SCOPED_TRACE(operation + " on rank " + std::to_string(wrong));
      const std::string named = "rank " + std::to_string(wrong) + " left " + operation + ": ";
      const Step& of_case = step;
      run_local(3, [&](const ProcessGroup& group) {
        expect_error_soon([&] { after_step(group, of_case, wrong); }, {named});
        expect_error_soon([&] { group.barrier(); }, {named});
      });
    }
  }
}

TEST(OneSidedTensorStepTest, ARankThatLeavesAStepIsNamedToAllAsProcesses) {
  for (const auto& [operation, step] : steps()) {
    SCOPED_TRACE(operation);
    const std::string named = "rank 1 left " + operation + ": ";
    const Step& of_case = step;
    testing::expect_good_processes(3, quick(), [&](const ProcessGroup& group) {
      expect_error_soon([&] { after_step(group, of_case, 1); }, {named});
    });
  }
}

TEST(OneSidedTensorStepTest, ARankThatLeavesALayerOnAMeshOfTwoDimensionsIsNamedAlongEach) {
  run_local(4, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2, 2});
    ParallelLinear layer(4, 6);
    DistributeModuleOptions options;
    options.partition = [](const std::string&, const std::string&, const at::Tensor&) {
      return Placements{kReplicate, Placement::shard(0)};
    };
    distribute_module(*layer, mesh, options);
    const auto forward = [&] { layer(group.rank() == 0 ? at::Tensor() : at::ones({2, 4})); };
    if (group.rank() == 0) {
      EXPECT_THROW(forward(), std::exception);
    } else if (group.rank() == 1) {
      expect_error_soon(
          [&] {
            forward();
            mesh.group(1).barrier();
          },
          {"rank 0 left forward of a parallel layer: "});
    } else {
      forward();
    }
  });
}

TEST(OneSidedTensorStepTest, IfAllRanksLeaveAStepTheGroupStaysUsable) {
  run_local(4, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2, 2});
    for (int i = 0; i < 3; ++i) {
      const DTensor a(mesh, MeshLayout({4, 6}, mesh.shape(), {kReplicate, kReplicate}), at::ones({4, 6}));
      EXPECT_THROW(dtensor::matmul(a, a), std::exception);
      expect_usable(group);
      EXPECT_THROW(dtensor::matmul(a, a), std::exception);
      EXPECT_THROW(dtensor::matmul(a, a), std::exception);
      EXPECT_TRUE(dtensor::equal(a, a));
      expect_usable(mesh.group(0));
      expect_usable(mesh.group(1));
    }
  });
}

}  // namespace
}  // namespace tessera
