// The state from which a sharded tensor is created again, on the same rank.

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "support/error_matchers.h"
#include "tensor/sharding_support.h"
#include "tessera/base/function_ref.h"
#include "tessera/comm/local_ranks.h"
#include "tessera/tensor/sharded_tensor.h"

namespace tessera {
namespace {

using testing::chunk_spec;
using testing::grid_spec;
using testing::SpecPtr;

std::vector<int> ranks_below(int end) {
  std::vector<int> ranks(static_cast<std::size_t>(end));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

class StateTest : public ::testing::TestWithParam<int> {
 protected:
  int world() const { return GetParam(); }
  SpecPtr grid() const { return grid_spec({4, 3}, {1, 2}, ranks_below(world())); }
};
INSTANTIATE_TEST_SUITE_P(Worlds, StateTest, ::testing::Values(1, 2, 3, 4));

TEST_P(StateTest, IsAllThatATensorIs) {
  run_local(world(), [&](const ProcessGroup& group) {
    const ShardedTensor tensor = ShardedTensor::rand(grid(), {4, 3}, group);
    const ShardedTensorState state = tensor.state();
    EXPECT_EQ(state.metadata, tensor.metadata());
    EXPECT_EQ(state.process_group, (ProcessGroupState{group.rank(), group.rank(), world(), world()}));
    EXPECT_TRUE(*state.sharding_spec == *grid());
    EXPECT_FALSE(state.init_rrefs);
    const ShardedTensor again = ShardedTensor::from_state(state, group);
    EXPECT_FALSE(again.is_same(tensor));
    EXPECT_EQ(again.metadata(), tensor.metadata());
    EXPECT_TRUE(again.sharding_spec() == tensor.sharding_spec());
    ASSERT_EQ(again.local_shards().size(), tensor.local_shards().size());
    for (std::size_t i = 0; i < again.local_shards().size(); ++i) {
      EXPECT_EQ(again.local_shards()[i].metadata, tensor.local_shards()[i].metadata);
      EXPECT_TRUE(again.local_shards()[i].tensor.is_same(tensor.local_shards()[i].tensor));
    }
  });
}

TEST_P(StateTest, KnowsItsRankInTheGroupAndInTheWorld) {
  run_local(world(), [&](const ProcessGroup& group) {
    std::vector<int> descending = ranks_below(world());
    std::reverse(descending.begin(), descending.end());
    if (world() > 2) descending.pop_back();
    const std::optional<ProcessGroup> part = group.subgroup(descending);
    if (!part) return;
    const int size = static_cast<int>(descending.size());
    const SpecPtr spec = chunk_spec(0, ranks_below(size));
    const ShardedTensor tensor = ShardedTensor::zeros(spec, {4, 3}, *part);
    EXPECT_EQ(tensor.state().process_group,
              (ProcessGroupState{world() - 1 - group.rank(), group.rank(), size, world()}));
    ShardedTensor::from_state(tensor.state(), *part);
  });
}

TEST_P(StateTest, OfAnotherRankOrSizeIsRefusedOnAllRanks) {
  run_local(world(), [&](const ProcessGroup& group) {
    const ShardedTensor tensor = ShardedTensor::zeros(grid(), {4, 3}, group);
    const bool is_last = group.rank() == world() - 1;
    const std::string who = world() == 1 ? "" : "rank " + std::to_string(world() - 1) + ": ";
    const auto refuse = [&](int ProcessGroupState::*number, const std::string& what, int found) {
      ShardedTensorState state = tensor.state();
      if (is_last) state.process_group.*number = 7;
      EXPECT_ERROR(ShardedTensor::from_state(state, group), ErrorCode::invalid_argument,
                   who + "sharded tensor from its state: " + what + " is " + std::to_string(found) +
                       ", expected 7 as in the state");
    };
    refuse(&ProcessGroupState::rank, "the rank in the group", world() - 1);
    refuse(&ProcessGroupState::world_rank, "the rank in the world", world() - 1);
    refuse(&ProcessGroupState::size, "the size of the group", world());
    refuse(&ProcessGroupState::world_size, "the size of the world", world());
  });
}

TEST_P(StateTest, WhoseShardsAreNotThoseOfItsMetadataIsRefusedOnAllRanks) {
  run_local(world(), [&](const ProcessGroup& group) {
    const ShardedTensor tensor = ShardedTensor::zeros(grid(), {4, 3}, group);
    const auto refuse = [&](FunctionRef<void(ShardedTensorState&)> spoil, const std::string& what,
                            const std::string& found = "") {
      ShardedTensorState state = tensor.state();
      if (group.rank() == world() - 1) spoil(state);
      EXPECT_ERROR(ShardedTensor::from_state(state, group), ErrorCode::invalid_argument, what, found);
    };
    const std::string last = "rank " + std::to_string(world() - 1), shard = "local shard 0 of " + last;
    const int count = 8 / world();  // of the shards of the last rank
    refuse([](ShardedTensorState& state) { state.sharding_spec = nullptr; }, "sharding_spec is null");
    refuse([](ShardedTensorState& state) { state.local_shards.pop_back(); },
           fmt::format("{} has {} local shards, expected {} as in the metadata", last, count - 1, count));
    refuse([](ShardedTensorState& state) { state.local_shards[0].metadata.shard_offsets[0] += 1; }, shard + " is [");
    const auto refuse_tensor = [&](FunctionRef<at::Tensor(const at::Tensor&)> spoiled, const std::string& what) {
      refuse([&](ShardedTensorState& state) { state.local_shards[0].tensor = spoiled(state.local_shards[0].tensor); },
             " on " + last + ": " + what);
    };
    refuse_tensor([](const at::Tensor&) { return at::zeros({9}); }, "size [9], expected [");
    refuse_tensor([](const at::Tensor&) { return at::Tensor(); }, "the tensor is undefined, expected a tensor");
    refuse_tensor([](const at::Tensor& x) { return x.to(at::kDouble); }, "dtype float64, expected float32");
    refuse_tensor([](const at::Tensor& x) { return x.clone().requires_grad_(); }, "requires_grad true, expected false");
    refuse_tensor([](const at::Tensor& x) { return x.to(at::kMeta); }, "device meta, expected cpu");
  });
}

}  // namespace
}  // namespace tessera
