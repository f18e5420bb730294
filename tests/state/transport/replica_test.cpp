// Copies of the ranks' states on other ranks.

#include "tessera/state/replica.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>

#include "support/child_process.h"
#include "support/error_matchers.h"
#include "support/one_sided.h"
#include "support/rank_processes.h"
#include "support/temporary_directory.h"
#include "tensor/sharding_support.h"
#include "tessera/checkpoint/faulty_storage.h"
#include "tessera/comm/local_ranks.h"
#include "tessera/state/object_archive.h"
#include "tessera/tensor/dtensor.h"

namespace tessera {
namespace {

using testing::expect_error_soon;
using testing::quick;
using testing::run_processes;
using testing::TemporaryDirectory;

StateDict simple_state(int rank, int step = 0) {
  return {{"layer1.weight", at::full({64, 128}, rank, at::kFloat).add(at::arange(128))},
          {"layer1.bias", at::full({64}, step, at::kFloat)},
          {"nested", Dict{{"param", at::full({16, 16}, rank)}, {"names", List{"a", rank}}}},
          {"scalar", at::scalar_tensor(rank)},
          {"step", step}};
}

StateDict parallel_state(const ProcessGroup& group, double plus) {
  const DeviceMesh mesh(group, {group.size()});
  const at::Tensor full = at::arange(96, at::kDouble).view({12, 8}) + plus;
  std::vector<int> ranks;
  for (int r = 0; r < group.size(); ++r) ranks.push_back(r);
  return {{"sharded_param", distribute_tensor(full, mesh, {Placement::shard(0)}, std::nullopt)},
          {"replicated_param", distribute_tensor(full, mesh, {Placement::replicate()}, std::nullopt)},
          {"sharded_tensor", testing::shard(full, testing::chunk_spec(0, ranks), group)},
          {"rank_scalar", at::scalar_tensor(group.rank())},
          {"plus", plus}};
}

class ReplicaTest : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Worlds, ReplicaTest, ::testing::Values(2, 3, 4, 5, 6));

TEST_P(ReplicaTest, EachRankKeepsTheStateOfTheRankHalfwayAround) {
  run_local(GetParam(), [](const ProcessGroup& group) {
    const int ranks = group.size(), other = (group.rank() + ranks / 2) % ranks;
    Replica replica(group);
    EXPECT_EQ(replica.keeps(), other);
    EXPECT_EQ(replica.copy(), nullptr);
    if (ranks % 2 == 0) {
      EXPECT_EQ(replica.keeper(), other);
    }
    for (int step = 0; step < 3; ++step) {
      StateDict state = simple_state(group.rank(), step);
      replica.update(state);
      state.at("scalar").get<at::Tensor>().fill_(-1);
      ASSERT_NE(replica.copy(), nullptr);
      EXPECT_EQ(*replica.copy(), simple_state(other, step));
    }
  });
}

// PyTorch: test_replication_dtensors, test_replication_sharded_tensors.
TEST_P(ReplicaTest, PartsOfTensorsAreKeptAsBoxesAndRestored) {
  const TemporaryDirectory directory;
  run_local(GetParam(), [&](const ProcessGroup& group) {
    const auto storage = checkpoint::file_system_storage(directory / "replicas");
    Replica replica(group, storage);
    replica.update(parallel_state(group, 5));
    const StateDict& copy = *replica.copy();
    EXPECT_EQ(copy.at("rank_scalar").get<at::Tensor>().item<int>(), replica.keeps());
    const at::Tensor full = at::arange(96, at::kDouble).view({12, 8}) + 5;
    for (const char* name : {"sharded_param", "replicated_param", "sharded_tensor"}) {
      const auto part = copy.at(name).get<std::shared_ptr<Checkpointable>>();
      EXPECT_EQ(part->size(), (std::vector<std::int64_t>{12, 8}));
      ASSERT_LE(part->local_chunks().size(), 1u);
      for (const Box& box : part->local_chunks()) {
        EXPECT_TRUE(at::equal(part->local_tensor(0), full.slice(0, box.offsets[0], box.offsets[0] + box.sizes[0])));
      }
    }
    for (const bool from_files : {false, true}) {
      Replica again(group, storage);
      Replica& used = from_files ? again : replica;
      StateDict state = parallel_state(group, 0);
      const bool has_lost_it = from_files || group.rank() == 1;
      used.restore(state, has_lost_it);
      const double plus = has_lost_it ? 5 : 0;
      const StateDict expected = parallel_state(group, plus);
      for (const char* name : {"sharded_tensor", "rank_scalar", "plus"}) EXPECT_EQ(state.at(name), expected.at(name));
      for (const char* name : {"sharded_param", "replicated_param"}) {
        const auto& tensor = state.at(name).get<std::shared_ptr<Checkpointable>>();
        EXPECT_TRUE(at::equal(
            DTensor::from_checkpointable(tensor)->local_tensor(),
            DTensor::from_checkpointable(expected.at(name).get<std::shared_ptr<Checkpointable>>())->local_tensor()))
            << name << from_files;
      }
    }
  });
}

TEST(ReplicaFileTest, HasTheStateInTheFormatOfTorchSave) {
  const TemporaryDirectory directory;
  run_local(4, [&](const ProcessGroup& group) {
    const auto storage = checkpoint::file_system_storage(directory / "a" / "replicas");
    Replica replica(group, storage);
    for (int step = 0; step < 2; ++step) replica.update(simple_state(group.rank(), step));
    const int other = (group.rank() + 2) % 4;
    EXPECT_EQ(replica.file_name(), fmt::format("rank_{}_replica_partner_{}.pt", group.rank(), other));
    group.barrier();
    EXPECT_EQ(storage->list().size(), 4u);
    const Value loaded = load_object(read_all(*storage->open(replica.file_name())), "replica");
    EXPECT_EQ(loaded, Value(Dict{{"state", simple_state(other, 1)}, {"parts", List()}}));
  });
}

TEST(ReplicaRestoreTest, WithoutACopyItIsAnErrorOnAllRanks) {
  run_local(4, [](const ProcessGroup& group) {
    Replica replica(group, group.rank() < 4 ? checkpoint::memory_storage() : nullptr);
    StateDict state = simple_state(group.rank());
    EXPECT_ERROR(replica.restore(state, group.rank() == 1), ErrorCode::not_found,
                 "rank 3: no copy of the state of rank 1 in memory and no file memory/rank_3_replica_partner_1.pt");
    replica.update(state);
    replica.restore(state, group.rank() == 1);
    EXPECT_EQ(state, simple_state(group.rank()));
  });
}

TEST(ReplicaRestoreTest, AFailedUpdateKeepsTheCopies) {
  run_local(4, [](const ProcessGroup& group) {
    bool fails = false;
    Replica replica(
        group, checkpoint::faulty_storage(checkpoint::memory_storage(), [&](const checkpoint::StorageEvent& event) {
          return fails && event.step == checkpoint::StorageStep::write ? checkpoint::StorageFault::io_error
                                                                       : checkpoint::StorageFault::none;
        }));
    replica.update(simple_state(group.rank(), 1));
    fails = group.rank() == 2;
    expect_error_soon([&] { replica.update(simple_state(group.rank(), 2)); }, {"update a Replica", "rank 2"});
    EXPECT_EQ(*replica.copy(), simple_state(replica.keeps(), 1));
    fails = false;
    StateDict bad = simple_state(group.rank(), 3);
    if (group.rank() == 0) bad["sparse"] = at::ones({2}).to_sparse();
    expect_error_soon([&] { replica.update(bad); }, {"update a Replica", "rank 0"});
    EXPECT_EQ(*replica.copy(), simple_state(replica.keeps(), 1));
    replica.update(simple_state(group.rank(), 4));
    EXPECT_EQ(*replica.copy(), simple_state(replica.keeps(), 4));
  });
}

TEST_P(ReplicaTest, ARankWithABadStateIsNamedAndTheGroupStaysUsable) {
  run_local(GetParam(), [](const ProcessGroup& group) {
    Replica replica(group);
    replica.update(simple_state(group.rank(), 1));
    for (int bad = 0; bad < group.size(); ++bad) {
      StateDict state = simple_state(group.rank(), 2);
      if (group.rank() == bad) state["sparse"] = at::ones({2}).to_sparse();
      EXPECT_ERROR(replica.update(state), ErrorCode::unsupported, "update a Replica", fmt::format("rank {}: ", bad),
                   "Sparse");
      EXPECT_EQ(*replica.copy(), simple_state(replica.keeps(), 1));
      StateDict lost = simple_state(group.rank(), 3);
      if (group.rank() == bad) lost.erase("scalar");
      EXPECT_ERROR(replica.restore(lost, true), ErrorCode::invalid_argument, "restore from a Replica",
                   fmt::format("rank {}: ", bad), "'scalar'");
    }
    replica.update(simple_state(group.rank(), 4));
    EXPECT_EQ(*replica.copy(), simple_state(replica.keeps(), 4));
  });
}

TEST(ReplicaRestoreTest, AGroupOfOneRankOrOfOtherRanksIsRefused) {
  EXPECT_ERROR(Replica(ProcessGroup()), ErrorCode::invalid_argument, "the group has one rank");
  run_local(4, [](const ProcessGroup& group) {
    Replica replica(group);
    const int reversed[] = {3, 2, 1, 0};
    EXPECT_ERROR(replica.rejoin(*group.subgroup(reversed)), ErrorCode::invalid_argument, "expected rank");
  });
}

// Rank 1 of 4 dies, and another process takes its place. The others make a new group with it.
TEST(ReplicaRestoreTest, ARankThatDiedGetsItsStateFromTheRankThatKeepsIt) {
  InitOptions again = quick();
  again.world_size = 4;
  again.master_port = free_port();
  const auto is_restored = [&](Replica& replica, StateDict state, int rank) {
    replica.restore(state, rank == 1);
    replica.update(state);
    return state == simple_state(rank, 3) && *replica.copy() == simple_state((rank + 2) % 4, 3);
  };
  const pid_t started = testing::start_child([&] {
    again.rank = 1;
    try {
      Replica replica(init_process_group(again));
      ::_exit(is_restored(replica, simple_state(1, 0), 1) ? 0 : 1);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "%s\n", error.what());
      ::_exit(1);
    }
  });
  const auto outcomes = run_processes(4, quick(), [&](const ProcessGroup& group) {
    Replica replica(group);
    replica.update(simple_state(group.rank(), 3));
    group.barrier();
    if (group.rank() == 1) ::kill(::getpid(), SIGKILL);
    EXPECT_ERROR(group.barrier(), ErrorCode::rank_failure, "rank 1");
    again.rank = group.rank();
    replica.rejoin(init_process_group(again));
    return std::string(is_restored(replica, simple_state(group.rank(), 3), group.rank()) ? "good" : "another state");
  });
  for (const std::size_t rank : {0u, 2u, 3u}) EXPECT_EQ(outcomes[rank].report, "good") << rank;
  EXPECT_EQ(testing::wait_for_child(started), 0);
}

}  // namespace
}  // namespace tessera
