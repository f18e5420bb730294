// Loads into states and modules on meta, which get memory then.

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/optim/sgd.h>

#include "state/parallel_mlp.h"
#include "support/error_matchers.h"
#include "support/temporary_directory.h"
#include "tensor/sharding_support.h"
#include "tessera/comm/local_ranks.h"
#include "tessera/state/load.h"
#include "tessera/state/save.h"
#include "tessera/state/state_dict.h"
#include "tessera/tensor/dtensor.h"

namespace tessera {
namespace {

using testing::indices;
using testing::parallel_mlp;
using testing::ParallelMlp;
using testing::TemporaryDirectory;

// Puts every parameter and buffer on meta. Module::to cannot.
template <typename Module>
Module on_meta(Module module) {
  std::vector<at::Tensor> tensors = module->parameters();
  for (const at::Tensor& buffer : module->buffers()) tensors.push_back(buffer);
  for (const at::Tensor& tensor : tensors) {
    const at::Tensor meta = at::empty_like(tensor, tensor.options().device(at::kMeta).requires_grad(false));
    tensor.unsafeGetTensorImpl()->shallow_copy_from(meta.getIntrusivePtr());
    EXPECT_TRUE(tensor.is_meta());
  }
  return module;
}

TEST(LoadOnMetaTest, TensorsOfAStateAreReplacedByOnesWithMemory) {
  const TemporaryDirectory directory;
  save({{"a", indices({3, 2})}, {"nested", Dict{{"list", List{indices({4}), 1}}}}, {"here", indices({2})}},
       directory.path());
  const at::Tensor here = at::zeros({2}, at::kLong);
  const auto meta = [](std::vector<std::int64_t> size) {
    return at::empty(size, at::TensorOptions().dtype(at::kLong).device(at::kMeta));
  };
  StateDict state{{"a", meta({3, 2})}, {"nested", Dict{{"list", List{meta({4}), 0}}}}, {"here", here}};
  load(state, directory.path());
  EXPECT_EQ(state,
            (StateDict{{"a", indices({3, 2})}, {"nested", Dict{{"list", List{indices({4}), 1}}}}, {"here", here}}));
  EXPECT_TRUE(at::equal(here, indices({2})));
  StateDict wrong{{"a", meta({3, 3})}, {"here", here}};
  EXPECT_ERROR(load(wrong, directory.path()), ErrorCode::invalid_argument, "tensor 'a' has shape [3, 2]");
  EXPECT_TRUE(wrong.at("a").get<at::Tensor>().is_meta());
  ShardedTensorOptions options;
  options.dtype = at::kLong;
  const auto spec = std::make_shared<ChunkShardingSpec>(0, std::vector<RemoteDevice>{RemoteDevice("rank:0/meta")});
  StateDict sharded{{"a", ShardedTensor::empty(spec, {3, 2}, {}, options)}};
  EXPECT_ERROR(load(sharded, directory.path()), ErrorCode::unsupported, "load 'a': the sharded tensor is on meta");
}

TEST(LoadOnMetaTest, WhatTheCheckpointLacksStaysOnMeta) {
  const TemporaryDirectory directory;
  StateDict saved = get_model_state_dict(*ParallelMlp());
  saved.erase("up.bias");
  save({{"model", saved}}, directory.path());
  LoadOptions options;
  options.rules.allow_partial = true;
  run_local(2, [&](const ProcessGroup& group) {
    for (const bool is_parallel : {false, true}) {
      ParallelMlp model = on_meta(is_parallel ? parallel_mlp(DeviceMesh(group, {2})) : ParallelMlp());
      const at::Tensor other = at::ones({2}, at::kMeta);
      StateDict state{{"model", get_model_state_dict(*model)}, {"pair", Tuple{other, 1}}};
      const Value before = state.at("model").get<Dict>().at("up.bias");
      EXPECT_EQ(load(state, directory.path(), group, options).missing,
                (std::vector<std::string>{"model.up.bias", "pair"}));
      EXPECT_EQ(state.at("model").get<Dict>().at("up.bias"), before);
      EXPECT_TRUE(state.at("pair").get<Tuple>()[0].get<at::Tensor>().is_same(other));
      EXPECT_ERROR(set_model_state_dict(*model, state.at("model").get<Dict>()), ErrorCode::invalid_argument,
                   "without memory: 'up.bias' is on meta");
    }
  });
}

TEST(LoadOnMetaTest, AModuleGetsItsMemoryFromAFullStateOrThatOfRank0) {
  for (const bool is_broadcast : {false, true}) {
    run_local(2, [&](const ProcessGroup& group) {
      ParallelMlp source;
      StateDictOptions options;
      options.group = group;
      options.full_state_dict = options.broadcast_from_rank0 = is_broadcast;
      const StateDict full = get_model_state_dict(*source);
      ParallelMlp model = on_meta(ParallelMlp());
      const std::vector<at::Tensor> parameters = model->parameters();
      set_model_state_dict(*model, is_broadcast && group.rank() != 0 ? StateDict() : full, options);
      EXPECT_EQ(get_model_state_dict(*model), full);
      for (std::size_t i = 0; i < parameters.size(); ++i) {
        EXPECT_TRUE(parameters[i].is_same(model->parameters()[i]));
        EXPECT_TRUE(parameters[i].requires_grad());
        EXPECT_FALSE(parameters[i].is_alias_of(source->parameters()[i]));
      }
      // It trains as the source does.
      const at::Tensor input = at::linspace(-1, 1, 24).view({4, 6});
      const auto train = [&](ParallelMlp& each) {
        torch::optim::SGD optimizer(each->parameters(), 0.1);
        each->down(each->up(each->norm(input))).pow(2).sum().backward();
        optimizer.step();
      };
      train(source);
      train(model);
      EXPECT_EQ(get_model_state_dict(*model), get_model_state_dict(*source));
    });
  }
}

TEST(LoadOnMetaTest, WhatFailsLeavesTheModuleOnMeta) {
  ParallelMlp model = on_meta(ParallelMlp());
  StateDict state = get_model_state_dict(*ParallelMlp());
  state["up.bias"] = at::ones({7});
  EXPECT_ERROR(set_model_state_dict(*model, state), ErrorCode::invalid_argument, "'up.bias' is [7], expected [5]");
  EXPECT_ERROR(set_model_state_dict(*model, get_model_state_dict(*on_meta(ParallelMlp()))), ErrorCode::invalid_argument,
               "without memory: 'norm.weight' is on meta");
  for (const at::Tensor& parameter : model->parameters()) EXPECT_TRUE(parameter.is_meta());
  // What is missing stays there.
  StateDictOptions options;
  options.strict = false;
  state.erase("up.bias");
  set_model_state_dict(*model, state, options);
  EXPECT_TRUE(model->up->bias.is_meta());
  EXPECT_FALSE(model->up->weight.is_meta());
}

// On six ranks, some local tensors of the 5 rows have no elements.
TEST(LoadOnMetaTest, AParallelModuleOnMetaLoadsItsPartsOfACheckpoint) {
  const TemporaryDirectory directory;
  ParallelMlp source;
  save({{"model", get_model_state_dict(*source)}}, directory.path());
  for (const int ranks : {1, 2, 3, 6}) {
    run_local(ranks, [&](const ProcessGroup& group) {
      const DeviceMesh mesh(group, {ranks});
      ParallelMlp model = on_meta(parallel_mlp(mesh));
      StateDict state{{"model", get_model_state_dict(*model)}};
      load(state, directory.path(), group);
      set_model_state_dict(*model, state.at("model").get<Dict>());
      for (const at::Tensor& parameter : model->parameters()) {
        EXPECT_EQ(parameter.device(), at::Device(at::kCPU));
        EXPECT_TRUE(parameter.requires_grad());
      }
      StateDictOptions options;
      options.full_state_dict = true;
      options.group = group;
      EXPECT_EQ(get_model_state_dict(*model, options), get_model_state_dict(*source));
      const at::Tensor input = at::linspace(-1, 1, 24).view({4, 6});
      EXPECT_TRUE(at::allclose(model->down(model->up(input)), source->down(source->up(input))));
      // Straight from the full state.
      ParallelMlp again = on_meta(parallel_mlp(mesh));
      set_model_state_dict(*again, get_model_state_dict(*source));
      EXPECT_EQ(get_model_state_dict(*again, options), get_model_state_dict(*source));
    });
  }
}

}  // namespace
}  // namespace tessera
