// Sharded states of DTensors: their values, and that models of any kind load them.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/optim/adamw.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/small_model.h"
#include "support/error_matchers.h"
#include "tessera/comm/local_ranks.h"
#include "tessera/state/load.h"
#include "tessera/state/save.h"
#include "tessera/tensor/dtensor.h"
#include "tessera/tensor/dtensor/explicit_redistribution.h"

namespace tessera::fsdp {
namespace {

struct InRows {
  InRows(const ProcessGroup& group, const Options& options)
      : model(make_model(), group, options), optimizer(model.parameters(), torch::optim::AdamWOptions(0.02)) {}

  // Trains with all batches of a step on each rank, so that the result does not depend on the ranks.
  double step(int step) {
    model.zero_grad();
    const at::Tensor loss = loss_of(model(at::cat({batch_of(step, 0), batch_of(step, 1)})));
    loss.backward();
    optimizer.step();
    return loss.item<double>();
  }
  StateDict state(StateDictType type, const StateOptions& options) {
    return {{"model", model.state_dict(type, options)}, {"optim", model.optim_state_dict(optimizer, type, options)}};
  }
  void load_state(const StateDict& state) {
    model.load_state_dict(state.at("model").get<Dict>());
    model.load_optim_state_dict(optimizer, state.at("optim").get<Dict>());
  }

  FullyShardedDataParallel<SmallModel> model;
  torch::optim::AdamW optimizer;
};

// Returns rank's rows, as torch.chunk splits them.
at::Tensor rows_of_rank(const at::Tensor& full, std::int64_t rank, std::int64_t ranks) {
  const std::int64_t rows = full.size(0), each = (rows + ranks - 1) / ranks;
  const std::int64_t begin = std::min(rows, rank * each);
  return full.narrow(0, begin, std::min(rows, begin + each) - begin);
}

// Expects that a value is a DTensor on the mesh with the rows of `full`, or equals it if it is not sharded.
void expect_rows(const Value& value, const Value& full, const DeviceMesh& mesh, const std::string& what) {
  if (value.is<at::Tensor>()) {
    EXPECT_EQ(value, full) << what;
    return;
  }
  const auto tensor = DTensor::from_checkpointable(value.get<std::shared_ptr<Checkpointable>>());
  ASSERT_TRUE(tensor) << what;
  EXPECT_EQ(tensor->device_mesh(), mesh) << what;
  Placements placements(static_cast<std::size_t>(mesh.ndim()));
  placements.back() = Placement::shard(0);
  EXPECT_EQ(tensor->placements(), placements) << what;
  const at::Tensor expected =
      rows_of_rank(full.get<at::Tensor>(), mesh.local_rank(mesh.ndim() - 1), mesh.size(mesh.ndim() - 1));
  EXPECT_TRUE(at::equal(tensor->local_tensor(), expected)) << what;
}

std::size_t count_dtensors(const Dict& values) {
  std::size_t count = 0;
  for (const auto& [name, value] : values) {
    const auto* part = value.get_if<std::shared_ptr<Checkpointable>>();
    if (part != nullptr && DTensor::from_checkpointable(*part)) ++count;
  }
  return count;
}

void expect_rows_of_full(InRows& one, const DeviceMesh& mesh, bool is_sharded) {
  const StateDict full = one.state(StateDictType::full, {.rank0_only = false});
  const StateDict rows = one.state(StateDictType::sharded, {.mesh = mesh});
  const Dict& params = rows.at("model").get<Dict>();
  ASSERT_EQ(params.size(), full.at("model").get<Dict>().size());
  EXPECT_EQ(count_dtensors(params), is_sharded ? params.size() - 1 : 0u);  // all but a buffer
  for (const auto& [name, value] : params) {
    expect_rows(value, full.at("model").get<Dict>().at(name), mesh, to_string(name));
  }
  const Dict &states = rows.at("optim").get<Dict>().at("state").get<Dict>(),
             &of_full = full.at("optim").get<Dict>().at("state").get<Dict>();
  ASSERT_EQ(states.size(), of_full.size());
  for (const auto& [name, state] : states) {
    EXPECT_EQ(count_dtensors(state.get<Dict>()), is_sharded ? 2u : 0u);  // exp_avg, exp_avg_sq
    for (const auto& [key, value] : state.get<Dict>()) {
      expect_rows(value, of_full.at(name).get<Dict>().at(key), mesh, to_string(name) + " " + to_string(key));
    }
  }
  EXPECT_EQ(rows.at("optim").get<Dict>().at("param_groups"), full.at("optim").get<Dict>().at("param_groups"));
}

// PyTorch: test_fsdp_init_with_device_mesh, test_dtensor_sharded_tensor_state_dict_identical.
TEST(FsdpDTensorStateTest, ARankHasRowsOfParametersAndOfTheirOptimizerState) {
  run_local(3, [](const ProcessGroup& group) {
    const DeviceMesh mesh = DeviceMesh::from_group(group);
    ExplicitRedistributionOptions strict;
    strict.strict = true;
    const ExplicitRedistributionContext context(strict);  // refuses what ops redistribute, which a state is not
    for (const Options& way : kWays) {
      InRows one(group, way);
      one.step(0);
      expect_rows_of_full(one, mesh, is_sharded(way.strategy));
    }
  });
}

// PyTorch: test_hsdp_init_with_device_mesh, test_dtensor_sharded_tensor_state_dict_identical.
TEST(FsdpDTensorStateTest, ReplicasHaveTheSameRows) {
  run_local(4, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2, 2}, {"replicas", "shards"});
    for (const bool use_orig_params : {true, false}) {
      Options options = options_of(ShardingStrategy::hybrid_shard, use_orig_params);
      options.replicas = mesh.group("replicas");
      InRows one(mesh.group("shards"), options), other(mesh.group("shards"), options);
      one.step(0);
      expect_rows_of_full(one, mesh, true);
      other.load_state(one.state(StateDictType::sharded, {.mesh = mesh}));
      EXPECT_EQ(other.step(1), one.step(1));
    }
  });
}

// PyTorch: test_dtensor_sharded_optim_load_state_dict, test_dtensor_sharded_model_load_state_dict,
// test_flatten_sharded_optim_state_dict_nested.
TEST(FsdpDTensorStateTest, AModelWithOtherUnitsLoadsThem) {
  run_local(3, [](const ProcessGroup& group) {
    const DeviceMesh mesh = DeviceMesh::from_group(group);
    InRows one(group, kWays[0]);
    one.step(0);
    const StateDict rows = one.state(StateDictType::sharded, {.mesh = mesh});
    const double next = one.step(1), last = one.step(2);
    const std::vector<std::pair<Options, WrapPolicy>> others = {{kWays[0], wrap_none()},
                                                                {kWays[1], nullptr},
                                                                {kWays[1], wrap_modules<torch::nn::LinearImpl>()},
                                                                {kWays[3], nullptr},
                                                                {kWays[4], wrap_none()}};
    for (const auto& [way, policy] : others) {
      Options options = way;
      options.policy = policy;
      InRows other(group, options);
      other.load_state(rows);
      EXPECT_NEAR(other.step(1), next, 1e-12);
      EXPECT_NEAR(other.step(2), last, 1e-12);
    }
  });
}

TEST(FsdpDTensorStateTest, ACheckpointOfThemIsThatOfOtherForms) {
  const auto rows = checkpoint::memory_storage(), boxes = checkpoint::memory_storage();
  std::vector<double> losses;
  run_local(3, [&](const ProcessGroup& group) {
    InRows one(group, kWays[0]);
    one.step(0);
    save(one.state(StateDictType::sharded, {.mesh = DeviceMesh::from_group(group)}), rows, group);
    save(one.state(StateDictType::sharded, {}), boxes, group);
    const std::vector<double> next{one.step(1), one.step(2)};
    if (group.rank() == 0) losses = next;
  });
  run_local(2, [&](const ProcessGroup& group) {
    for (const bool loads_rows : {true, false}) {
      InRows one(group, kWays[1]);
      StateOptions options;
      if (loads_rows) options.mesh = DeviceMesh::from_group(group);
      StateDict state = one.state(StateDictType::sharded, options);
      load(state, loads_rows ? boxes : rows, group);
      one.load_state(state);
      for (int step = 1; step < 3; ++step) {
        EXPECT_NEAR(one.step(step), losses[static_cast<std::size_t>(step - 1)], 1e-12) << loads_rows;
      }
    }
  });
}

TEST(FsdpDTensorStateTest, WhatDoesNotFitIsAnErrorOnAllRanks) {
  run_local(2, [](const ProcessGroup& group) {
    InRows one(group, kWays[0]);
    const DeviceMesh mesh = DeviceMesh::from_group(group, {"dp"});
    const DeviceMesh other = DeviceMesh::from_group(*group.subgroup(std::vector<int>{0, 1}));
    const char* const expected = "expected one with a dimension whose group is the one that shards '";
    EXPECT_ERROR(one.state(StateDictType::sharded, {.mesh = other}), ErrorCode::invalid_argument, expected);
    EXPECT_ERROR(one.state(StateDictType::sharded, {.mesh = group.rank() == 0 ? other : mesh}),
                 ErrorCode::invalid_argument, expected);
    EXPECT_ERROR(one.model.optim_state_dict(one.optimizer, StateDictType::sharded, {.mesh = other}),
                 ErrorCode::invalid_argument, expected);
    const StateDict rows = one.state(StateDictType::sharded, {.mesh = mesh});
    StateDict params = rows.at("model").get<Dict>(), optim = rows.at("optim").get<Dict>();
    const StateDict before = one.model.state_dict(StateDictType::full, {.rank0_only = false});
    if (group.rank() == 1) params.erase("inner.weight");
    EXPECT_ERROR(one.model.load_state_dict(params), ErrorCode::invalid_argument, "DTensor inner.weight");
    params["inner.weight"] = params.at("head.weight");
    EXPECT_ERROR(one.model.load_state_dict(params), ErrorCode::invalid_argument,
                 "'inner.weight' has shape [3, 5], expected [5, 7]");
    EXPECT_EQ(one.model.state_dict(StateDictType::full, {.rank0_only = false}), before);
    if (group.rank() == 1) optim.at("state").get<Dict>().at("inner.bias").get<Dict>().erase("exp_avg");
    EXPECT_ERROR(one.model.load_optim_state_dict(one.optimizer, optim), ErrorCode::invalid_argument,
                 "DTensor inner.bias 'exp_avg'");
  });
}

}  // namespace
}  // namespace tessera::fsdp
