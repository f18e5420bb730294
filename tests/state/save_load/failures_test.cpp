// Steps of the storage that fail while ranks save and load, with any coordinator: every rank throws and names it.

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <set>

#include "support/error_matchers.h"
#include "tensor/sharding_support.h"
#include "tessera/checkpoint/faulty_storage.h"
#include "tessera/comm/local_ranks.h"
#include "tessera/state/load.h"
#include "tessera/state/same_keys.h"
#include "tessera/state/save.h"

namespace tessera {
namespace {

using checkpoint::StorageEvent;
using checkpoint::StorageFault;
using checkpoint::StorageStep;
using testing::chunk_spec;
using testing::fill_with_indices;
using testing::holds_indices;

constexpr int kRanks = 3;

StateDict sharded_state(const ProcessGroup& group, bool is_filled) {
  ShardedTensorOptions options;
  options.dtype = at::kLong;
  const ShardedTensor rows = ShardedTensor::full(chunk_spec(0, {2, 0, 1}), {7, 3}, -1, group, options);
  if (is_filled) fill_with_indices(rows);
  const at::Tensor in_pair = is_filled ? at::ones({4}) : at::zeros({4});  // a storage of an object
  return {{"rows", rows},
          {"full", is_filled ? at::ones({4}) : at::zeros({4})},
          {"pair", Tuple{in_pair, 1}},
          {"step", is_filled ? 5 : 0}};
}

std::shared_ptr<checkpoint::Storage> saved_by_ranks() {
  const auto storage = checkpoint::memory_storage();
  run_local(kRanks, [&](const ProcessGroup& group) { save(sharded_state(group, true), storage, group); });
  return storage;
}

// Returns the steps that one call takes on each rank, without a fault.
template <typename F>
std::vector<std::vector<StorageStep>> steps_of(const std::shared_ptr<checkpoint::Storage>& storage, const F& call) {
  std::vector<std::vector<StorageStep>> steps(kRanks);
  run_local(kRanks, [&](const ProcessGroup& group) {
    std::mutex mutex;  // threads of a rank read together
    const auto watched = checkpoint::faulty_storage(storage, [&](const StorageEvent& event) {
      const std::lock_guard lock(mutex);
      steps[static_cast<std::size_t>(group.rank())].push_back(event.step);
      return StorageFault::none;
    });
    call(group, watched);
  });
  return steps;
}

// Calls `call` with a storage on which event `n` of `failing` fails; returns the errors of the ranks, or nothing if
// there was no such event.
template <typename F>
std::vector<std::string> errors_of(const std::shared_ptr<checkpoint::Storage>& storage, int failing, std::uint64_t n,
                                   const F& call) {
  std::vector<std::string> errors(kRanks);
  std::atomic<bool> has_happened = false;
  run_local(kRanks, [&](const ProcessGroup& group) {
    const auto faulty = checkpoint::faulty_storage(storage, [&](const StorageEvent& event) {
      if (group.rank() != failing || event.number != n) return StorageFault::none;
      has_happened = true;
      return StorageFault::io_error;
    });
    try {
      call(group, faulty);
    } catch (const Error& error) {
      errors[static_cast<std::size_t>(group.rank())] = error.what();
      EXPECT_EQ(error.code(), ErrorCode::io) << error.what();
    }
    group.barrier();  // the group is still usable
  });
  if (has_happened) return errors;
  EXPECT_THAT(errors, ::testing::Each(""));
  return {};
}

void expect_named_on_all(const std::vector<std::string>& errors, int failing, StorageStep step) {
  for (const std::string& error : errors) {
    EXPECT_EQ(error, errors[0]);
    EXPECT_THAT(error, ::testing::HasSubstr("rank " + std::to_string(failing) + ": "));
    EXPECT_THAT(error, ::testing::HasSubstr(std::string(storage_step_name(step)) + " "));
    EXPECT_THAT(error, ::testing::HasSubstr("failed on command"));
  }
}

TEST(FailingStorageTest, EveryStepOfALoadIsAnErrorOnEveryRankWhoeverCoordinates) {
  const auto storage = saved_by_ranks();
  for (const int coordinator : {0, 2}) {
    const auto call = [&](const ProcessGroup& group, const std::shared_ptr<checkpoint::Storage>& from) {
      LoadOptions options;
      options.coordinator_rank = coordinator;
      StateDict state = sharded_state(group, false);
      const StateDict before = state;
      try {
        load(state, from, group, options);
      } catch (const Error&) {
        EXPECT_EQ(state.at("step"), before.at("step"));
        EXPECT_EQ(state.at("pair"), before.at("pair"));
        throw;
      }
      EXPECT_TRUE(holds_indices(state.at("rows").get<ShardedTensor>()));
    };
    const auto steps = steps_of(storage, call);
    std::set<StorageStep> failed;
    for (int rank = 0; rank < kRanks; ++rank) {
      const auto& of_rank = steps[static_cast<std::size_t>(rank)];
      ASSERT_FALSE(of_rank.empty());
      for (std::uint64_t n = 0; n < of_rank.size(); ++n) {
        SCOPED_TRACE(fmt::format("coordinator {}, rank {}, event {}", coordinator, rank, n));
        const auto errors = errors_of(storage, rank, n, call);
        // The order of the steps of several threads varies. If one thread does what two did, there are fewer reads.
        if (errors.empty()) continue;
        ASSERT_THAT(errors, ::testing::Each(::testing::Not("")));
        EXPECT_THAT(errors[0], ::testing::HasSubstr("rank " + std::to_string(rank) + ": "));
        EXPECT_THAT(errors[0], ::testing::HasSubstr("failed on command"));
        EXPECT_THAT(errors, ::testing::Each(errors[0]));
        failed.insert(of_rank[n]);
      }
    }
    EXPECT_TRUE(failed.contains(StorageStep::open) && failed.contains(StorageStep::read));
  }
}

TEST(FailingStorageTest, ASaveIsAnErrorOnEveryRankWhoeverCoordinates) {
  for (const int coordinator : {0, 2}) {
    for (const int failing : {0, 2}) {
      for (const StorageStep step :
           {StorageStep::prepare, StorageStep::create, StorageStep::write, StorageStep::finish, StorageStep::rename}) {
        if (step == StorageStep::rename && failing != coordinator) continue;  // the coordinator alone commits
        const auto storage = saved_by_ranks();
        const std::vector<std::string> files = storage->list();
        std::vector<std::string> errors(kRanks);
        run_local(kRanks, [&](const ProcessGroup& group) {
          const auto faulty = checkpoint::faulty_storage(storage, [&](const StorageEvent& event) {
            return group.rank() == failing && event.step == step ? StorageFault::io_error : StorageFault::none;
          });
          SaveOptions options;
          options.coordinator_rank = coordinator;
          try {
            save(sharded_state(group, false), faulty, group, options);
          } catch (const Error& error) {
            errors[static_cast<std::size_t>(group.rank())] = error.what();
            EXPECT_EQ(error.code(), ErrorCode::io) << error.what();
          }
        });
        SCOPED_TRACE(fmt::format("coordinator {}, rank {}, {}", coordinator, failing, storage_step_name(step)));
        expect_named_on_all(errors, failing, step);
        EXPECT_EQ(storage->list(), files);
        run_local(kRanks, [&](const ProcessGroup& group) {
          StateDict state = sharded_state(group, false);
          load(state, storage, group);
          EXPECT_TRUE(holds_indices(state.at("rows").get<ShardedTensor>()));
        });
      }
    }
  }
}

TEST(FailingStorageTest, WithoutAGroupTooReadsAreNamed) {
  const auto storage = checkpoint::memory_storage();
  save({{"w", at::ones({3})}, {"step", 5}}, storage);
  for (const StorageStep step : {StorageStep::open, StorageStep::read}) {
    for (const bool fails_at_metadata : {true, false}) {
      const auto faulty = checkpoint::faulty_storage(storage, [&](const StorageEvent& event) {
        const bool is_wanted = event.file.ends_with(fails_at_metadata ? ".metadata" : ".distcp");
        return event.step == step && is_wanted ? StorageFault::io_error : StorageFault::none;
      });
      StateDict state{{"w", at::zeros({3})}, {"step", 0}};
      EXPECT_ERROR(load(state, faulty), ErrorCode::io, std::string(storage_step_name(step)) + " ",
                   fails_at_metadata ? ".metadata" : "__0_0.distcp", "failed on command");
      EXPECT_EQ(state.at("step"), Value(0));
    }
  }
}

// PyTorch: _assert_same_keys.
TEST(SameKeysTest, ANameThatARankLacksIsAnErrorOnAll) {
  const StateDict state{{"model", Dict{{"w", at::ones({2})}, {"b", 1}}}, {"step", 3}};
  check_same_keys(state, {});
  run_local(3, [&](const ProcessGroup& group) {
    StateDict mine = state;
    mine["step"] = group.rank();  // values may differ
    check_same_keys(mine, group);
    if (group.rank() != 1) mine.at("model").get<Dict>()["c"] = 7;
    EXPECT_ERROR(check_same_keys(mine, group), ErrorCode::invalid_argument, "rank 1 lacks 'model.c'");
    mine = state;
    if (group.rank() == 2) mine["a"] = Dict{{"b", 1}};
    EXPECT_ERROR(check_same_keys(mine, group), ErrorCode::invalid_argument,
                 "rank 0 lacks 'a.b', which other ranks have");
    if (group.rank() == 2) mine["a.b"] = 2;
    EXPECT_ERROR(check_same_keys(mine, group), ErrorCode::invalid_argument, "rank 2: ", "'a.b'");
    mine = state;
    for (int i = 0; i < (group.rank() == 0 ? 25 : 0); ++i) mine["more" + std::to_string(i)] = i;
    EXPECT_ERROR(check_same_keys(mine, group), ErrorCode::invalid_argument, "rank 1 lacks 'more0', ", " and 5 more");
  });
}

}  // namespace
}  // namespace tessera
