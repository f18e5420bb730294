// State dicts of type local: the flat parameters, without padding, as PyTorch saves them.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/optim/sgd.h>

#include <memory>
#include <vector>

#include "fsdp/small_model.h"
#include "support/error_matchers.h"
#include "tessera/comm/local_ranks.h"
#include "tessera/layout/sharding_spec.h"
#include "tessera/state/load.h"
#include "tessera/state/save.h"

namespace tessera::fsdp {
namespace {

using ::testing::ElementsAre;
using OfLinear = FullyShardedDataParallel<torch::nn::Linear>;

const StateOptions kOnAllRanks{.rank0_only = false};

torch::nn::Linear make_linear(std::int64_t in, std::int64_t out) {
  torch::nn::Linear linear(in, out);
  fill(*linear);
  return linear;
}

template <typename Model>
void step_of_sgd(Model& model, const at::Tensor& input) {
  torch::optim::SGD optimizer(model.parameters(), 0.1);
  model(input).sum().backward();
  optimizer.step();
}

// PyTorch: test_distributed_checkpoint, test_local_state_dict_reshard.
TEST(FsdpLocalStateTest, SavedWithoutPaddingItIsLoadedOnOtherRanks) {
  const Options options = options_of(ShardingStrategy::full_shard, /*use_orig_params=*/false);
  const auto storage = checkpoint::memory_storage();
  StateDict expected;
  run_local(4, [&](const ProcessGroup& group) {
    FullyShardedDataParallel<SmallModel> model(make_model(), group, options);
    step_of_sgd(model, batch_of(0, group.rank()));
    const StateDict state = model.state_dict(StateDictType::local);
    const ShardedTensor& inner = state.at("inner._flat_param").get<ShardedTensor>();
    EXPECT_THAT(inner.size(), ElementsAre(5 * 7 + 5));
    const ShardedTensor& head = state.at("head._flat_param").get<ShardedTensor>();
    EXPECT_THAT(head.size(), ElementsAre(3 * 5 + 3));  // in shards of 5
    ASSERT_EQ(head.local_shards().size(), 1u);
    EXPECT_EQ(head.local_shards()[0].tensor.numel(), group.rank() == 3 ? 3 : 5);
    EXPECT_TRUE(head.local_shards()[0].tensor.is_alias_of(model.handle(5).flat_param()));
    const StateDict on_cpu = model.state_dict(StateDictType::local, {.offload_to_cpu = true});  // where it is already
    const Shard& shard = on_cpu.at("head._flat_param").get<ShardedTensor>().local_shards().at(0);
    EXPECT_TRUE(shard.tensor.is_alias_of(model.handle(5).flat_param()));
    save(state, storage, group);
    const StateDict full = model.state_dict(StateDictType::full, kOnAllRanks);
    if (group.rank() == 0) expected = full;
  });
  for (const int ranks : {4, 2, 3}) {
    run_local(ranks, [&](const ProcessGroup& group) {
      FullyShardedDataParallel<SmallModel> model(make_model(), group, options);
      StateDict state = model.state_dict(StateDictType::local);
      EXPECT_NE(model.state_dict(StateDictType::full, kOnAllRanks), expected);
      load(state, storage, group);
      model.load_state_dict(state);
      EXPECT_EQ(model.state_dict(StateDictType::full, kOnAllRanks), expected) << ranks;
    });
  }
}

// PyTorch: test_local_state_dict_with_empty_ranks.
TEST(FsdpLocalStateTest, RanksWithoutElementsHaveNoShard) {
  run_local(4, [](const ProcessGroup& group) {
    for (const bool use_orig_params : {false, true}) {
      const Options options = options_of(ShardingStrategy::full_shard, use_orig_params);
      OfLinear model(make_linear(1, 1), group, options), other(make_linear(1, 1), group, options);
      step_of_sgd(model, at::full({2, 1}, 3, at::kDouble));
      const StateDict state = model.state_dict(StateDictType::local);
      const ShardedTensor& flat = state.at("_flat_param").get<ShardedTensor>();
      EXPECT_EQ(flat.size()[0], use_orig_params ? 4 : 2);  // each parameter begins at 16 bytes
      EXPECT_EQ(flat.metadata().shards_metadata.size(), use_orig_params ? 4u : 2u);
      EXPECT_EQ(flat.local_shards().size(), use_orig_params || group.rank() < 2 ? 1u : 0u);
      EXPECT_NE(full_params(other)[0].item<double>(), full_params(model)[0].item<double>());
      other.load_state_dict(state);
      EXPECT_EQ(other.state_dict(StateDictType::full, kOnAllRanks), model.state_dict(StateDictType::full, kOnAllRanks));
      const auto storage = checkpoint::memory_storage();
      save(state, storage, group);
      OfLinear loaded(make_linear(1, 1), group, options);
      StateDict into = loaded.state_dict(StateDictType::local);
      load(into, storage, group);
      loaded.load_state_dict(into);
      EXPECT_EQ(full_params(loaded)[0].item<double>(), full_params(model)[0].item<double>());
    }
  });
}

TEST(FsdpLocalStateTest, OfOtherSizeOrOnOtherRanksItIsRefused) {
  run_local(2, [](const ProcessGroup& group) {
    const Options options = options_of(ShardingStrategy::full_shard, /*use_orig_params=*/false);
    OfLinear model(make_linear(3, 1), group, options), larger(make_linear(4, 1), group, options);
    const StateDict before = model.state_dict(StateDictType::full, kOnAllRanks);
    EXPECT_ERROR(model.load_state_dict(larger.state_dict(StateDictType::local)), ErrorCode::invalid_argument,
                 "'_flat_param' has shape [5], expected [4]");
    const auto on_rank_1_first = std::make_shared<ChunkShardingSpec>(
        0, std::vector<RemoteDevice>{RemoteDevice("rank:1/cpu"), RemoteDevice("rank:0/cpu")});
    const StateDict turned{{"_flat_param", ShardedTensor::zeros(on_rank_1_first, {4}, group, {.dtype = at::kDouble})}};
    EXPECT_ERROR(model.load_state_dict(turned), ErrorCode::invalid_argument,
                 "'_flat_param' has 2 elements on this rank in 1 shards, expected 2 in one shard that begins at");
    EXPECT_EQ(model.state_dict(StateDictType::full, kOnAllRanks), before);
  });
}

}  // namespace
}  // namespace tessera::fsdp
