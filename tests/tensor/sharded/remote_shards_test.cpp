// Remote shards between processes: each rank's references to the others' shards, their lifetime, and every failure.

#include "tensor/sharded/remote_shards.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "support/error_matchers.h"
#include "support/one_sided.h"
#include "support/rank_processes.h"
#include "support/tensorpipe.h"
#include "tensor/sharding_support.h"
#include "tessera/base/function_ref.h"
#include "tessera/comm/local_ranks.h"
#include "tessera/tensor/sharded_tensor.h"

namespace tessera {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::chunk_spec;
using testing::expect_good_processes;
using testing::fill_with_indices;
using testing::grid_spec;
using testing::indices;
using testing::quick;
using testing::RankOutcome;
using testing::run_processes;
using testing::Sizes;
using testing::soon;
using testing::SpecPtr;

Rpc init_quick_rpc(const ProcessGroup& group, const std::string& name = "") {
  RpcOptions options;
  options.name = name;
  options.timeout = testing::kLongTimeout;
  options.threads = 2;
  return init_rpc(group, options);
}

ShardedTensorOptions with_rrefs() {
  ShardedTensorOptions options;
  options.dtype = at::kLong;
  options.init_rrefs = true;
  return options;
}

std::vector<int> all_ranks(int world) {
  std::vector<int> ranks;
  for (int r = 0; r < world; ++r) ranks.push_back(r);
  return ranks;
}

using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl>;

std::vector<WeakTensor> weak_shards(const ShardedTensor& tensor) {
  std::vector<WeakTensor> shards;
  for (const Shard& shard : tensor.local_shards()) shards.emplace_back(shard.tensor.getIntrusivePtr());
  return shards;
}

bool all_freed(const std::vector<WeakTensor>& shards) {
  return std::all_of(shards.begin(), shards.end(), [](const WeakTensor& shard) { return shard.expired(); });
}

bool none_freed(const std::vector<WeakTensor>& shards) {
  return std::none_of(shards.begin(), shards.end(), [](const WeakTensor& shard) { return shard.expired(); });
}

// Checks that this rank has references to exactly the shards that the metadata place on other ranks of the group, in
// their order, and that each fetched shard has the right elements.
void expect_all_remote_shards(const ShardedTensor& tensor) {
  const ProcessGroup& group = tensor.process_group();
  std::map<int, std::vector<ShardMetadata>> expected;
  for (const ShardMetadata& shard : tensor.metadata().shards_metadata) {
    const int rank = static_cast<int>(*shard.placement->rank());
    if (rank != group.rank()) expected[group.world_ranks()[static_cast<std::size_t>(rank)]].push_back(shard);
  }
  const at::Tensor full = indices(tensor.size(), tensor.scalar_type());
  ASSERT_EQ(tensor.remote_shards().size(), expected.size());
  for (const auto& [owner, shards] : tensor.remote_shards()) {
    ASSERT_EQ(shards.size(), expected[owner].size()) << "rank " << owner;
    for (std::size_t i = 0; i < shards.size(); ++i) {
      EXPECT_EQ(shards[i].owner(), owner);
      EXPECT_EQ(shards[i].metadata(), expected[owner][i]);
      const Shard fetched = shards[i].fetch();
      EXPECT_EQ(fetched.metadata, expected[owner][i]);
      EXPECT_EQ(fetched.tensor.sizes(), expected[owner][i].shard_sizes);
      if (fetched.tensor.numel() == 0) continue;
      EXPECT_TRUE(at::equal(fetched.tensor, box_view(full, expected[owner][i].box())));
    }
  }
}

class RemoteShardsTest : public ::testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    if (!testing::libtorch_has_tensorpipe()) GTEST_SKIP() << "this LibTorch was built without TensorPipe";
    ASSERT_TRUE(is_rpc_available());
  }
  int world() const { return GetParam(); }
  SpecPtr rows() const { return chunk_spec(0, all_ranks(world())); }
  // Two rows on each rank, one on the last.
  Sizes uneven_size() const { return {2 * world() - 1, 3}; }
};
INSTANTIATE_TEST_SUITE_P(Worlds, RemoteShardsTest, ::testing::Values(1, 2, 3, 4));

// Cases that need another rank.
class RemoteShardsOfSeveralTest : public RemoteShardsTest {};
INSTANTIATE_TEST_SUITE_P(Worlds, RemoteShardsOfSeveralTest, ::testing::Values(2, 3, 4));

TEST_P(RemoteShardsTest, EveryRankFetchesTheShardsOfEveryOtherOfEverySpec) {
  expect_good_processes(world(), quick(), [&](const ProcessGroup& group) {
    Rpc rpc = init_quick_rpc(group);
    for (const Sizes& size : {Sizes{7}, Sizes{1}, Sizes{5, 3}, Sizes{3, 2, 5}}) {
      for (const SpecPtr& spec : testing::specs_of_every_kind(size, world())) {
        const ShardedTensor tensor = ShardedTensor::empty(spec, size, group, with_rrefs());
        EXPECT_TRUE(tensor.init_rrefs());
        fill_with_indices(tensor);
        group.barrier();
        expect_all_remote_shards(tensor);
        group.barrier();
      }
    }
    rpc.shutdown();
  });
}

TEST_P(RemoteShardsTest, EveryFactoryHasFilledTheShardsWhenItReturns) {
  expect_good_processes(world(), quick(), [&](const ProcessGroup& group) {
    Rpc rpc = init_quick_rpc(group);
    for (const int value : {0, 1, 7}) {
      const ShardedTensor tensor = value == 0   ? ShardedTensor::zeros(rows(), uneven_size(), group, with_rrefs())
                                   : value == 1 ? ShardedTensor::ones(rows(), uneven_size(), group, with_rrefs())
                                                : ShardedTensor::full(rows(), uneven_size(), 7, group, with_rrefs());
      for (const auto& [owner, shards] : tensor.remote_shards()) {
        EXPECT_TRUE(
            at::equal(shards.at(0).fetch().tensor, at::full(shards.at(0).metadata().shard_sizes, value, at::kLong)));
      }
    }
    rpc.shutdown();
  });
}

TEST_P(RemoteShardsTest, EveryConstructionFromShards) {
  expect_good_processes(world(), quick(), [&](const ProcessGroup& group) {
    Rpc rpc = init_quick_rpc(group);
    ShardedTensorOptions options;
    options.dtype = at::kLong;
    const ShardedTensor tensor = ShardedTensor::empty(rows(), uneven_size(), group, options);
    fill_with_indices(tensor);
    expect_all_remote_shards(ShardedTensor::from_local_shards(tensor.local_shards(), uneven_size(), group, true));
    expect_all_remote_shards(
        ShardedTensor::from_local_tensor(tensor.local_tensor(), rows(), uneven_size(), group, true));
    expect_all_remote_shards(ShardedTensor::from_local_shards_and_global_metadata(
        tensor.local_shards(), tensor.metadata(), group, nullptr, true));
    group.barrier();
    rpc.shutdown();
  });
}

TEST_P(RemoteShardsTest, OfASubgroupHaveTheirRanksInTheWorld) {
  expect_good_processes(world(), quick(), [&](const ProcessGroup& group) {
    Rpc rpc = init_quick_rpc(group);
    std::vector<int> descending;
    for (int r = world() - 1; r >= (world() > 2 ? 1 : 0); --r) descending.push_back(r);
    if (const std::optional<ProcessGroup> part = group.subgroup(descending)) {
      const ShardedTensor tensor =
          ShardedTensor::empty(chunk_spec(0, all_ranks(part->size())), uneven_size(), *part, with_rrefs());
      fill_with_indices(tensor);
      part->barrier();
      expect_all_remote_shards(tensor);
    }
    group.barrier();
    rpc.shutdown();
  });
}

TEST_P(RemoteShardsTest, FollowTheTensorThroughReshard) {
  expect_good_processes(world(), quick(), [&](const ProcessGroup& group) {
    Rpc rpc = init_quick_rpc(group);
    ShardedTensor tensor = ShardedTensor::empty(rows(), uneven_size(), group, with_rrefs());
    fill_with_indices(tensor);
    const std::vector<WeakTensor> before = weak_shards(tensor);
    for (const SpecPtr& spec : testing::specs_of_every_kind(uneven_size(), world())) {
      tensor.reshard(spec);
      expect_all_remote_shards(tensor);
      EXPECT_EQ(registered_sharded_tensors(), 1u);
    }
    group.barrier();
    EXPECT_TRUE(soon([&] { return all_freed(before); }));
    rpc.shutdown();
  });
}

TEST_P(RemoteShardsTest, ConvertedTensorsHaveTheirOwn) {
  expect_good_processes(world(), quick(), [&](const ProcessGroup& group) {
    Rpc rpc = init_quick_rpc(group);
    const ShardedTensor tensor = ShardedTensor::empty(rows(), uneven_size(), group, with_rrefs());
    fill_with_indices(tensor);
    ShardedTensor::ToOptions options;
    options.dtype = at::kDouble;
    const ShardedTensor converted = tensor.to(options);
    EXPECT_TRUE(converted.init_rrefs());
    expect_all_remote_shards(converted);
    EXPECT_EQ(registered_sharded_tensors(), 2u);
    group.barrier();
    rpc.shutdown();
  });
}

TEST_P(RemoteShardsTest, ShardsMayBePlacedByTheNameOfTheirWorker) {
  expect_good_processes(world(), quick(), [&](const ProcessGroup& group) {
    const auto spec = [](const std::vector<std::string>& placements) -> SpecPtr {
      std::vector<RemoteDevice> devices;
      for (const std::string& placement : placements) devices.emplace_back(placement);
      return std::make_shared<ChunkShardingSpec>(0, devices);
    };
    std::vector<std::string> workers;
    for (int r = 0; r < world(); ++r) workers.push_back("trainer" + std::to_string(r) + "/cpu");
    Rpc rpc = init_quick_rpc(group, "trainer" + std::to_string(group.rank()));
    const ShardedTensor tensor = ShardedTensor::full(spec(workers), {world(), 2}, 5, group, with_rrefs());
    ASSERT_EQ(tensor.local_shards().size(), 1u);
    EXPECT_EQ(tensor.local_shards()[0].metadata.shard_offsets[0], group.rank());
    for (int r = 0; r < world(); ++r) {
      if (r == group.rank()) continue;
      EXPECT_TRUE(at::equal(tensor.remote_shards().at(r).at(0).fetch().tensor, at::full({1, 2}, 5, at::kLong)));
    }
    ShardedTensor::ToOptions options;
    options.dtype = at::kInt;
    EXPECT_EQ(tensor.to(options).metadata().shards_metadata, tensor.metadata().shards_metadata);
    workers.back() = "missing/cpu";
    EXPECT_ERROR(ShardedTensor::empty(spec(workers), {world(), 2}, group), ErrorCode::invalid_argument,
                 "there is no such worker");
    const int first[] = {0};
    if (const auto alone = group.subgroup(first); alone && world() > 1) {
      EXPECT_ERROR(ShardedTensor::empty(spec({"trainer1/cpu"}), {2}, *alone), ErrorCode::invalid_argument,
                   "its worker is rank 1 of the world, expected a rank of the process group");
    }
    rpc.shutdown();
  });
}

// One rank drops its tensor before the others. Its shards stay as long as another rank may fetch them.
TEST_P(RemoteShardsTest, NothingLeaksWhicheverRankDropsFirst) {
  expect_good_processes(world(), quick(), [&](const ProcessGroup& group) {
    Rpc rpc = init_quick_rpc(group);
    for (int first = 0; first < world(); ++first) {
      std::optional<ShardedTensor> tensor =
          ShardedTensor::empty(grid_spec({4, 4}, {1, 2}, all_ranks(world())), {4, 4}, group, with_rrefs());
      fill_with_indices(*tensor);
      const std::vector<WeakTensor> shards = weak_shards(*tensor);
      EXPECT_EQ(registered_sharded_tensors(), 1u);
      group.barrier();
      if (group.rank() == first) {
        tensor.reset();
        EXPECT_EQ(registered_sharded_tensors(), 0u);
      }
      group.barrier();
      if (group.rank() != first) expect_all_remote_shards(*tensor);
      if (group.rank() == first && world() > 1) {
        EXPECT_TRUE(none_freed(shards));
      }
      group.barrier();
      tensor.reset();
      EXPECT_EQ(registered_sharded_tensors(), 0u);
      EXPECT_TRUE(soon([&] { return all_freed(shards); }));
      group.barrier();
    }
    rpc.shutdown();
  });
}

TEST_P(RemoteShardsTest, OutliveTheTensorTheyWereTakenFrom) {
  expect_good_processes(world(), quick(), [&](const ProcessGroup& group) {
    Rpc rpc = init_quick_rpc(group);
    std::optional<ShardedTensor> tensor = ShardedTensor::full(rows(), uneven_size(), 3, group, with_rrefs());
    const std::vector<WeakTensor> shards = weak_shards(*tensor);
    std::map<int, std::vector<RemoteShard>> remote = tensor->remote_shards();
    tensor.reset();
    group.barrier();
    for (const auto& [owner, of_rank] : remote) {
      EXPECT_TRUE(
          at::equal(of_rank.at(0).fetch().tensor, at::full(of_rank.at(0).metadata().shard_sizes, 3, at::kLong)));
    }
    group.barrier();
    remote.clear();
    EXPECT_TRUE(soon([&] { return all_freed(shards); }));
    rpc.shutdown();
  });
}

TEST_P(RemoteShardsTest, CopiesAreOneTensorInTheRegister) {
  expect_good_processes(world(), quick(), [&](const ProcessGroup& group) {
    Rpc rpc = init_quick_rpc(group);
    std::optional<ShardedTensor> tensor = ShardedTensor::zeros(rows(), uneven_size(), group, with_rrefs());
    const std::vector<WeakTensor> shards = weak_shards(*tensor);
    std::optional<ShardedTensor> copy = tensor;
    const ShardedTensor without = ShardedTensor::zeros(rows(), uneven_size(), group);
    EXPECT_EQ(registered_sharded_tensors(), 1u);
    tensor.reset();
    EXPECT_EQ(registered_sharded_tensors(), 1u);
    EXPECT_EQ(copy->remote_shards().size(), static_cast<std::size_t>(world() - 1));
    copy.reset();
    EXPECT_EQ(registered_sharded_tensors(), 0u);
    group.barrier();
    EXPECT_TRUE(soon([&] { return all_freed(shards); }));
    rpc.shutdown();
  });
}

TEST_P(RemoteShardsTest, NeedRpc) {
  const auto refused = [&](const ProcessGroup& group) {
    const auto refuse = [&](FunctionRef<void()> make) {
      EXPECT_ERROR(make(), ErrorCode::invalid_argument,
                   "sharded tensor with init_rrefs: RPC is not initialized, expected a call of init_rpc before");
    };
    const ShardedTensor tensor = ShardedTensor::zeros(rows(), uneven_size(), group);
    refuse([&] { ShardedTensor::zeros(rows(), uneven_size(), group, with_rrefs()); });
    refuse([&] { ShardedTensor::from_local_shards(tensor.local_shards(), uneven_size(), group, true); });
    refuse([&] { ShardedTensor::from_local_tensor(tensor.local_tensor(), rows(), uneven_size(), group, true); });
    refuse([&] {
      ShardedTensor::from_local_shards_and_global_metadata(tensor.local_shards(), tensor.metadata(), group, nullptr,
                                                           true);
    });
    refuse([&] {
      ShardedTensorState state = tensor.state();
      state.init_rrefs = true;
      ShardedTensor::from_state(state, group);
    });
    group.barrier();
  };
  run_local(world(), refused);
  EXPECT_EQ(registered_sharded_tensors(), 0u);
  expect_good_processes(world(), quick(), refused);
}

TEST_P(RemoteShardsTest, NeedInitRrefs) {
  run_local(world(), [&](const ProcessGroup& group) {
    const ShardedTensor tensor = ShardedTensor::zeros(rows(), uneven_size(), group);
    EXPECT_FALSE(tensor.init_rrefs());
    EXPECT_ERROR(tensor.remote_shards(), ErrorCode::invalid_argument, "created without init_rrefs", "no references",
                 "expected a tensor created with it");
  });
}

TEST_P(RemoteShardsTest, WhatIsWrongOnOneRankIsAnErrorOnAll) {
  expect_good_processes(world(), quick(), [&](const ProcessGroup& group) {
    Rpc rpc = init_quick_rpc(group);
    const bool is_last = group.rank() == world() - 1;
    const ShardedTensor good = ShardedTensor::zeros(rows(), uneven_size(), group);
    const auto refuse = [&](FunctionRef<void()> make, const std::string& what) {
      EXPECT_ERROR(make(), ErrorCode::invalid_argument, what);
      EXPECT_EQ(registered_sharded_tensors(), 0u);
    };
    const at::Tensor local = good.local_tensor();
    const at::Tensor transposed = at::zeros({local.size(1), local.size(0) + 1}).t();
    refuse([&] { ShardedTensor::from_local_tensor(is_last ? transposed : local, rows(), uneven_size(), group, true); },
           "it is not contiguous");
    std::vector<Shard> shards = good.local_shards();
    if (is_last) shards.push_back(shards[0]);
    refuse([&] { ShardedTensor::from_local_shards_and_global_metadata(shards, good.metadata(), group, nullptr, true); },
           "rank " + std::to_string(world() - 1) + " has 2 local shards, expected 1 as in the metadata");
    if (is_last) shards[1].metadata.shard_offsets[0] = 100;
    refuse([&] { ShardedTensor::from_local_shards(shards, uneven_size(), group, true); }, "");
    const ShardedTensor tensor =
        ShardedTensor::zeros(rows(), uneven_size(), group, with_rrefs());  // the group still works
    EXPECT_EQ(tensor.remote_shards().size(), static_cast<std::size_t>(world() - 1));
    group.barrier();
    rpc.shutdown();
  });
}

TEST_P(RemoteShardsOfSeveralTest, MetadataThatDifferBetweenRanksAreRefused) {
  expect_good_processes(world(), quick(), [&](const ProcessGroup& group) {
    Rpc rpc = init_quick_rpc(group);
    // The last rank splits its shard in two; the others do not know.
    const Sizes size = {world(), 2};
    const SpecPtr row_chunks = chunk_spec(0, all_ranks(world()));
    ShardedTensorMetadata metadata = row_chunks->build_metadata(size, {});
    if (group.rank() == world() - 1) {
      ShardMetadata& last = metadata.shards_metadata.back();
      ShardMetadata second = last;
      last.shard_sizes[1] = 1;
      second.shard_sizes[1] = second.shard_offsets[1] = 1;
      metadata.shards_metadata.push_back(second);
    }
    std::vector<Shard> shards;
    for (const ShardMetadata& shard : metadata.shards_metadata) {
      if (*shard.placement->rank() == group.rank()) shards.push_back({at::zeros(shard.shard_sizes), shard});
    }
    EXPECT_ERROR(ShardedTensor::from_local_shards_and_global_metadata(shards, metadata, group, nullptr, true),
                 ErrorCode::invalid_argument, "sharded tensor with init_rrefs", "rank 0 has metadata",
                 "and rank " + std::to_string(world() - 1) + " has metadata");
    EXPECT_EQ(registered_sharded_tensors(), 0u);
    const WeakTensor alive(shards[0].tensor.getIntrusivePtr());
    shards.clear();
    group.barrier();
    EXPECT_TRUE(soon([&] { return alive.expired(); }));
    rpc.shutdown();
  });
}

// A rank that has returned, because it creates no references, learns of it in its next collective.
TEST_P(RemoteShardsOfSeveralTest, InitRrefsOnSomeRanksOnlyIsAnErrorOnAll) {
  expect_good_processes(world(), quick(), [&](const ProcessGroup& group) {
    Rpc rpc = init_quick_rpc(group);
    const SpecPtr spec = rows();
    const auto options_for = [](const std::string& mistake) {
      ShardedTensorOptions options = with_rrefs();
      options.init_rrefs = mistake != "no init_rrefs";
      return options;
    };
    const std::vector<testing::OneSidedCall> calls = {
        {"sharded tensor with init_rrefs",
         {"no init_rrefs", "another size"},
         [&](const ProcessGroup& g, const std::string& mistake) {
           const Sizes size = mistake == "another size" ? Sizes{2, 2} : uneven_size();
           ShardedTensor::empty(spec, size, g, options_for(mistake));
           g.barrier();
         }},
        {"sharded tensor from the tensor of one rank",
         {"no init_rrefs"},
         [&](const ProcessGroup& g, const std::string& mistake) {
           ShardedTensor::from_tensor(at::ones(uneven_size()), spec, g, 0, mistake.empty());
         }},
        {"sharded tensor from local shards",
         {"no init_rrefs"},
         [&](const ProcessGroup& g, const std::string& mistake) {
           const ShardedTensor tensor = ShardedTensor::zeros(spec, uneven_size(), g);
           ShardedTensor::from_local_shards(tensor.local_shards(), uneven_size(), g, mistake.empty());
         }},
    };
    testing::make_mistakes(group, calls);
    EXPECT_EQ(registered_sharded_tensors(), 0u);
    rpc.shutdown();
  });
}

TEST_P(RemoteShardsOfSeveralTest, RanksOfTheWorldAndOfRpcMustBeTheSame) {
  expect_good_processes(world(), quick(), [&](const ProcessGroup& group) {
    std::vector<int> descending = all_ranks(world());
    std::reverse(descending.begin(), descending.end());
    Rpc rpc = init_quick_rpc(*group.subgroup(descending));
    const std::string other = std::to_string(world() - 1);
    EXPECT_ERROR(ShardedTensor::zeros(rows(), uneven_size(), group, with_rrefs()), ErrorCode::invalid_argument,
                 "rank 0 in the world of process groups is RPC rank " + other + ", expected the same",
                 "rank " + other + " in the world of process groups is RPC rank 0");
    EXPECT_EQ(registered_sharded_tensors(), 0u);
    rpc.shutdown();
  });
}

TEST_P(RemoteShardsTest, AfterShutdownNothingIsFetched) {
  expect_good_processes(world(), quick(), [&](const ProcessGroup& group) {
    Rpc rpc = init_quick_rpc(group);
    ShardedTensor tensor = ShardedTensor::zeros(rows(), uneven_size(), group, with_rrefs());
    rpc.shutdown();
    for (const auto& [owner, shards] : tensor.remote_shards()) {
      EXPECT_ERROR(shards.at(0).fetch(), ErrorCode::invalid_argument, "shard [", "RPC is not initialized");
    }
    EXPECT_ERROR(tensor.reshard(chunk_spec(1, all_ranks(world()))), ErrorCode::invalid_argument,
                 "RPC is not initialized");
  });
}

TEST_P(RemoteShardsOfSeveralTest, AnOwnerThatDiedIsNamedWithTheShard) {
  const auto begin = std::chrono::steady_clock::now();
  const std::vector<RankOutcome> outcomes = run_processes(world(), quick(), [&](const ProcessGroup& group) {
    Rpc rpc = init_quick_rpc(group);
    {
      const ShardedTensor tensor = ShardedTensor::full(rows(), uneven_size(), 4, group, with_rrefs());
      group.barrier();
      if (group.rank() == 1) ::kill(::getpid(), SIGKILL);
      EXPECT_ERROR(group.barrier(), ErrorCode::rank_failure, "rank 1 died");
      EXPECT_ERROR(tensor.remote_shards().at(1).at(0).fetch(), ErrorCode::rank_failure, "shard [2, ", "on rank:1/cpu",
                   "fetch a tensor of rank 1: it did not answer");
      EXPECT_ERROR(ShardedTensor::zeros(rows(), uneven_size(), group, with_rrefs()), ErrorCode::rank_failure,
                   "rank 1 died");
    }
    EXPECT_EQ(registered_sharded_tensors(), 0u);
    EXPECT_ERROR(rpc.shutdown(), ErrorCode::rank_failure, "rank 1 died");
    return std::string(::testing::Test::HasFailure() ? "failed" : "good");
  });
  EXPECT_EQ(outcomes[1].signal, SIGKILL);
  for (std::size_t rank = 0; rank < outcomes.size(); ++rank) {
    if (rank != 1) {
      EXPECT_EQ(outcomes[rank].report, "good") << "rank " << rank;
    }
  }
  EXPECT_LT(std::chrono::steady_clock::now() - begin, testing::kSoon);
}

TEST_P(RemoteShardsTest, AStateIsMadeIntoATensorWithItsOwn) {
  expect_good_processes(world(), quick(), [&](const ProcessGroup& group) {
    Rpc rpc = init_quick_rpc(group);
    std::optional<ShardedTensor> tensor = ShardedTensor::empty(rows(), uneven_size(), group, with_rrefs());
    fill_with_indices(*tensor);
    const ShardedTensorState state = tensor->state();
    EXPECT_TRUE(state.init_rrefs);
    tensor.reset();
    EXPECT_EQ(registered_sharded_tensors(), 0u);
    const ShardedTensor again = ShardedTensor::from_state(state, group);
    EXPECT_EQ(registered_sharded_tensors(), 1u);
    expect_all_remote_shards(again);
    group.barrier();
    rpc.shutdown();
  });
}

TEST(RegisterTest, IdsCountUpAndEndWithTheTensor) {
  std::shared_ptr<RemoteShards> first = RemoteShards::make();
  const std::shared_ptr<RemoteShards> second = RemoteShards::make();
  EXPECT_EQ(second->id(), first->id() + 1);
  EXPECT_EQ(registered_sharded_tensors(), 2u);
  register_remote_shards(first->id(), {{3, {}}});
  EXPECT_EQ(first->by_rank().count(3), 1u);
  EXPECT_TRUE(second->by_rank().empty());
  const std::int64_t id = first->id();
  first.reset();
  EXPECT_EQ(registered_sharded_tensors(), 1u);
  EXPECT_ERROR(
      register_remote_shards(id, {}), ErrorCode::not_found,
      "no sharded tensor with id " + std::to_string(id) + ", expected one of [" + std::to_string(second->id()) + "]");
  EXPECT_ERROR(register_remote_shards(1000, {}), ErrorCode::not_found, "no sharded tensor with id 1000");
  EXPECT_EQ(RemoteShards::make()->id(), id + 2);  // ids are not reused
}

}  // namespace
}  // namespace tessera
