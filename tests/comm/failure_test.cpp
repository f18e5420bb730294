// Ranks that die, leave, never arrive, or throw. Every rank that waits for them must soon get an error naming them and
// the reason.

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <pthread.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <chrono>
#include <mutex>
#include <thread>

#include "comm/group_impl.h"
#include "comm/rendezvous/store.h"
#include "support/child_process.h"
#include "support/error_matchers.h"
#include "support/rank_processes.h"
#include "tessera/comm/internal/step.h"
#include "tessera/comm/local_ranks.h"

namespace tessera {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::HasSubstr;
using testing::kLongTimeout;
using testing::kSoon;
using testing::quick;
using testing::RankOutcome;
using testing::run_processes;
using ::testing::StartsWith;

struct NamedCollective {
  const char* name;
  std::function<void(const ProcessGroup& group)> call;
};

std::vector<NamedCollective> named_collectives() {
  const auto numbers = [](std::int64_t count) { return at::ones({count}); };
  const auto ones = [](const ProcessGroup& group) {
    return std::vector<std::int64_t>(static_cast<std::size_t>(group.size()), 1);
  };
  return {
      {"broadcast", [=](const ProcessGroup& g) { g.broadcast(numbers(3), 1); }},
      {"all_reduce", [=](const ProcessGroup& g) { g.all_reduce(numbers(3)); }},
      {"all_gather_into", [=](const ProcessGroup& g) { g.all_gather_into(numbers(g.size()), numbers(1)); }},
      {"reduce_scatter_into", [=](const ProcessGroup& g) { g.reduce_scatter_into(numbers(1), numbers(g.size())); }},
      {"all_to_all",
       [=](const ProcessGroup& g) { g.all_to_all(numbers(g.size()), numbers(g.size()), ones(g), ones(g)); }},
      {"gather",
       [=](const ProcessGroup& g) { g.gather(g.rank() == 2 ? numbers(g.size()) : at::Tensor(), numbers(1), 2); }},
      {"scatter",
       [=](const ProcessGroup& g) { g.scatter(numbers(1), g.rank() == 1 ? numbers(g.size()) : at::Tensor(), 1); }},
      {"barrier", [](const ProcessGroup& g) { g.barrier(); }},
      {"all_gather_bytes", [](const ProcessGroup& g) { g.all_gather_bytes({}); }},
      {"agree", [](const ProcessGroup& g) { g.agree("step", nullptr); }},
  };
}

class DeadRankTest : public ::testing::TestWithParam<std::size_t> {};
INSTANTIATE_TEST_SUITE_P(Collectives, DeadRankTest, ::testing::Range(std::size_t{0}, named_collectives().size()),
                         [](const auto& test) { return std::string(named_collectives()[test.param].name); });

// Rank 1 of 3 is killed before the collective. A rank that needs nothing from it may have completed by then; it gets
// the error in the barrier that follows.
TEST_P(DeadRankTest, IsNamedToEveryOther) {
  const NamedCollective collective = named_collectives()[GetParam()];
  const std::vector<RankOutcome> outcomes = run_processes(3, quick(), [&](const ProcessGroup& group) {
    group.barrier();
    if (group.rank() == 1) ::kill(::getpid(), SIGKILL);
    collective.call(group);
    group.barrier();
    return std::string("nothing happened");
  });
  EXPECT_EQ(outcomes[1].signal, SIGKILL);
  for (const int rank : {0, 2}) {
    const RankOutcome& outcome = outcomes[static_cast<std::size_t>(rank)];
    EXPECT_THAT(outcome.report, StartsWith("rank_failure: "));
    EXPECT_THAT(outcome.report, HasSubstr(" on rank " + std::to_string(rank) + " of 3"));
    EXPECT_THAT(outcome.report, HasSubstr("rank 1 died: no sign of life for 1000 ms"));
  }
}

TEST(FailureTest, TheRankThatKeepsTheStoreDies) {
  const std::vector<RankOutcome> outcomes = run_processes(3, quick(), [&](const ProcessGroup& group) {
    group.barrier();
    if (group.rank() == 0) ::kill(::getpid(), SIGKILL);
    group.barrier();
    return std::string("nothing happened");
  });
  for (const std::size_t rank : {1u, 2u}) {
    EXPECT_THAT(outcomes[rank].report, StartsWith("rank_failure: barrier on rank"));
    EXPECT_THAT(outcomes[rank].report, HasSubstr("rank 0, which keeps the store, is gone"));
  }
}

TEST(FailureTest, ARankThatDoesNotComeIsNamedWithWhatItDoes) {
  InitOptions options = quick();
  options.timeout = seconds(6);  // also the time that the ranks have to connect
  const std::vector<RankOutcome> outcomes = run_processes(3, options, [&](const ProcessGroup& group) {
    group.barrier();
    if (group.rank() == 2) std::this_thread::sleep_for(seconds(9));
    group.all_reduce(at::ones({1}));
    return std::string("nothing happened");
  });
  for (const std::size_t rank : {0u, 1u}) {
    EXPECT_THAT(outcomes[rank].report, StartsWith("rank_failure: all_reduce on rank"));
    EXPECT_THAT(outcomes[rank].report, HasSubstr("rank 2 did not arrive within 6"));
    EXPECT_THAT(outcomes[rank].report, HasSubstr("rank 2 is in no collective"));
  }
  // When it arrives, it learns that it is too late.
  EXPECT_THAT(outcomes[2].report, HasSubstr("rank 2 did not arrive within 6"));
}

TEST(FailureTest, ABarrierMayHaveATimeoutOfItsOwn) {
  const std::vector<RankOutcome> outcomes = run_processes(2, quick(), [&](const ProcessGroup& group) {
    group.barrier();
    if (group.rank() == 1) std::this_thread::sleep_for(seconds(2));
    group.barrier(milliseconds(500));
    return std::string("nothing happened");
  });
  EXPECT_THAT(outcomes[0].report, HasSubstr("rank 1 did not arrive within "));
}

TEST(FailureTest, ARankThatLeavesIsNamed) {
  const std::vector<RankOutcome> outcomes = run_processes(3, quick(), [&](const ProcessGroup& group) {
    group.barrier();
    if (group.rank() == 1) return std::string("enough");
    group.barrier();
    return std::string("nothing happened");
  });
  for (const std::size_t rank : {0u, 2u}) EXPECT_THAT(outcomes[rank].report, HasSubstr("rank 1 left the group"));
}

TEST(FailureTest, ARankThatNeverStartsIsMissed) {
  InitOptions options = quick();
  options.timeout = milliseconds(1500);
  options.master_port = free_port();
  options.world_size = 2;
  EXPECT_ERROR(init_process_group(options), ErrorCode::rank_failure, "init process group: rank 0 of 2");
  options.rank = 1;
  EXPECT_ERROR(init_process_group(options), ErrorCode::rank_failure, "rank 1 could not reach rank 0's store");
}

TEST(FailureTest, ARankThatDiesBeforeItHasConnectedIsNamed) {
  InitOptions options = quick();
  options.world_size = 2;
  options.master_port = free_port();
  const pid_t rank_1 = testing::start_child([&] {
    const comm::StorePtr store =
        comm::connect_store({options.master_addr, options.master_port, 1, options.timeout, options.liveness});
    const comm::Liveness liveness(comm::with_prefix("tessera/live", store), false, 1, 2, options.liveness);
    ::_exit(1);
  });
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_ERROR(init_process_group(options), ErrorCode::rank_failure, "init process group: rank 0 of 2",
               "rank 1 died: no sign of life for 1000 ms");
  EXPECT_LT(std::chrono::steady_clock::now() - begin, kSoon);
  testing::wait_for_child(rank_1);
}

TEST(FailureTest, ABrokenGroupSaysSoAgain) {
  const std::vector<RankOutcome> outcomes = run_processes(2, quick(), [&](const ProcessGroup& group) {
    group.barrier();
    if (group.rank() == 1) ::kill(::getpid(), SIGKILL);
    EXPECT_ERROR(group.barrier(), ErrorCode::rank_failure, "rank 1 died");
    EXPECT_ERROR(group.all_reduce(at::ones({1})), ErrorCode::rank_failure, "all_reduce on rank 0", "rank 1 died");
    const int alone[] = {0};
    group.subgroup(alone)->all_reduce(at::ones({1}));  // needs no other rank
    return std::string(::testing::Test::HasFailure() ? "failed" : "good");
  });
  EXPECT_EQ(outcomes[0].report, "good");
}

TEST(FailureTest, OptionsThatCannotBeMeant) {
  InitOptions options;
  options.rank = 2;
  options.world_size = 2;
  EXPECT_ERROR(init_process_group(options), ErrorCode::invalid_argument, "rank 2 of 2, expected 0 to 1");
  options.rank = 0;
  options.timeout = milliseconds(0);
  EXPECT_ERROR(init_process_group(options), ErrorCode::invalid_argument, "timeout 0 ms");
  options = quick();
  options.world_size = 2;
  options.backend = "smoke";
  options.master_port = free_port();
  EXPECT_ERROR(init_process_group(options), ErrorCode::unsupported, "no backend 'smoke'", "expected one of: gloo");
}

TEST(FailureTest, ATimeoutThatIsNotPositiveIsRefused) {
  EXPECT_ERROR(run_local(2, [](const ProcessGroup&) {}, {.timeout = milliseconds(0)}), ErrorCode::invalid_argument,
               "run 2 local ranks: timeout 0 ms, expected more than 0");
  EXPECT_ERROR(ProcessGroup().barrier(milliseconds(-1)), ErrorCode::invalid_argument, "barrier on rank 0",
               "timeout -1 ms, expected more than 0");
  run_local(2, [](const ProcessGroup& group) {
    if (group.rank() == 1) {
      EXPECT_ERROR(group.barrier(milliseconds(0)), ErrorCode::invalid_argument, "timeout 0 ms, expected more than 0");
    } else {
      EXPECT_ERROR(group.barrier(kLongTimeout), ErrorCode::rank_failure, "rank 1 refused barrier");
    }
  });
}

TEST(FailureTest, TheLongestTimeoutsAreLong) {
  InitOptions options = quick();
  options.timeout = options.liveness = milliseconds::max();
  testing::expect_good_processes(2, options, [](const ProcessGroup& group) { group.barrier(milliseconds::max()); });
  run_local(2, [](const ProcessGroup& group) { group.barrier(); }, {.timeout = milliseconds::max()});
}

TEST(FailureTest, LocalRanksWithoutThreadsAreAnError) {
  pthread_attr_t attributes;
  ::pthread_attr_init(&attributes);
  ASSERT_EQ(::pthread_attr_setstacksize(&attributes, std::size_t{1} << 47), 0);
  ASSERT_EQ(::pthread_setattr_default_np(&attributes), 0);
  EXPECT_ERROR(run_local(2, [](const ProcessGroup&) {}), ErrorCode::io, "run 2 local ranks: the system refused (",
               "expected threads for each rank");
}

// Rank 1 leaves a step after fewer calls than rank 2, and is noted first.
TEST(FailureTest, OfRanksThatLeaveAStepTheOneThatIsMissedIsNamed) {
  run_local(3, [](const ProcessGroup& group) {
    const ProcessGroup other = *group.subgroup(std::vector<int>{0, 1, 2});
    const at::Tensor x = at::ones({1}), y = at::ones({1});
    if (group.rank() == 1) comm::leave_step(group, "a step", "no memory");
    other.barrier();
    if (group.rank() == 2) {
      group.start_all_reduce(x);
      group.start_all_reduce(y);
      comm::leave_step(group, "a step", "no time");
    }
    other.barrier();
    if (group.rank() == 0) {
      EXPECT_ERROR(group.start_all_reduce(x).wait(), ErrorCode::rank_failure, "rank 1 left a step: no memory");
    }
    EXPECT_ERROR(other.barrier(), ErrorCode::rank_failure, "rank 1 left a step: no memory");
  });
}

TEST(FailureTest, RanksThatLeftAStepAfterDifferentCallsNeedNoThirdToFindOut) {
  run_local(3, [](const ProcessGroup& group) {
    const ProcessGroup other = *group.subgroup(std::vector<int>{0, 1, 2});
    const at::Tensor x = at::ones({1});
    if (group.rank() == 2) group.start_all_reduce(x);
    if (group.rank() != 0) comm::leave_step(group, "a step", "no memory");
    const ProcessGroup& next = group.rank() == 0 ? other : group;
    EXPECT_ERROR(next.barrier(), ErrorCode::rank_failure, "rank 1 left a step: no memory", "rank 2 left a step");
  });
}

// Ends between a wait that timed out and the query whether it has ended.
class LateWork : public ::c10d::Work {
 public:
  explicit LateWork(bool fails) : fails_(fails) {}
  bool isCompleted() override { return true; }
  bool wait(milliseconds) override {
    if (++waits_ == 1) throw std::runtime_error("Operation timed out!");
    if (fails_) throw std::runtime_error("connection reset");
    return true;
  }

 private:
  bool fails_;
  int waits_ = 0;
};

TEST(FailureTest, ACollectiveThatEndsJustAfterItsWaitHasEndedAsItDid) {
  ProcessGroup::Impl group;
  group.timeout = seconds(5);
  group.backend_name = "gloo";
  group.store = comm::make_local_store();
  group.transports = comm::make_transports("gloo", {group.store, 0, 1, group.timeout}, [] { return ""; });
  group.liveness = std::make_shared<comm::Liveness>(group.store, false, 0, 1, milliseconds(100));
  const auto run = [&](bool fails) {
    group.run("barrier", group.transports.control, at::kCPU,
              [&](comm::Backend&) { return c10::make_intrusive<LateWork>(fails); });
  };
  run(false);
  EXPECT_ERROR(run(true), ErrorCode::rank_failure, "barrier on rank 0 of 1", "connection reset");
}

// Without waiting for other ranks that might have died.
TEST(FailureTest, WhatTheBackendRefusesIsSaidAtOnce) {
  ProcessGroup::Impl group;
  group.timeout = kLongTimeout;
  group.world_ranks = {0, 1};
  group.store = comm::make_local_store();
  group.transports = comm::make_transports("gloo", {group.store, 0, 1, group.timeout}, [] { return ""; });
  group.liveness = std::make_shared<comm::Liveness>(group.store, false, 0, 2, kLongTimeout);
  const auto begin = std::chrono::steady_clock::now();
  const auto refused = [](comm::Backend&) -> comm::WorkPtr { throw std::runtime_error("no such operation"); };
  EXPECT_ERROR(group.run("broadcast", group.transports.control, at::kCPU, refused), ErrorCode::rank_failure,
               "broadcast on rank 0 of 2", "gloo rejected the call: no such operation");
  EXPECT_LT(std::chrono::steady_clock::now() - begin, kSoon);
}

class UnreachableStore final : public ::c10d::HashStore {
 public:
  void set(const std::string&, const std::vector<std::uint8_t>&) override {
    throw std::runtime_error("connection refused");
  }
};

// As if a stranger had connected to another rank, which took it for this one and waits in the first collective.
TEST(FailureTest, AThreadThatCannotConnectReportsItLongBeforeOthersTimeOut) {
  ProcessGroup::Impl group;
  group.timeout = kLongTimeout;
  group.world_ranks = {0, 1};
  group.store = c10::make_intrusive<UnreachableStore>();
  const comm::StorePtr signs = comm::make_local_store();
  group.backend_name = "gloo";
  group.liveness = std::make_shared<comm::Liveness>(signs, false, 0, 2, std::nullopt);
  comm::Liveness other(signs, false, 1, 2, std::nullopt);
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_ERROR(group.connect("init process group"), ErrorCode::rank_failure, "rank 0 of 2 could not connect",
               "connection refused");
  EXPECT_TRUE(testing::soon([&] { return !other.failure().empty(); }));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, kSoon);
}

TEST(FailureTest, ARankThatStillConnectsIsSaidToDoSo) {
  ProcessGroup::Impl group;
  group.timeout = seconds(60);
  group.world_ranks = {0, 1};
  group.rank = 1;
  group.store = comm::make_local_store();  // in which rank 0 never appears
  const comm::StorePtr signs = comm::make_local_store();
  group.backend_name = "gloo";
  group.liveness = std::make_shared<comm::Liveness>(signs, false, 1, 2, std::nullopt);
  comm::Liveness other(signs, false, 0, 2, std::nullopt);
  std::thread connecting(
      [&] { EXPECT_ERROR(group.connect("init process group"), ErrorCode::rank_failure, "could not connect"); });
  EXPECT_TRUE(testing::soon([&] { return other.call_of(1, "world").has_value(); }));
  const int ranks[] = {0, 1};
  EXPECT_THAT(other.explain_timeout(ranks, {"world", 1, "barrier"}, seconds(5)),
              HasSubstr("rank 1 did not arrive within 5000 ms; rank 1 is in the connection to other ranks"));
  connecting.join();
}

// A rank must not leave while others still connect to it.
TEST(FailureTest, RanksThatHaveNothingToDoLeaveNobodyBehind) {
  for (int i = 0; i < 20; ++i) {
    run_local(4, [](const ProcessGroup& group) {
      const int first_two[] = {0, 1};
      group.subgroup(first_two);
    });
  }
}

TEST(FailureTest, WhatAThreadThrowsIsThrownAndSaidToTheOthers) {
  std::mutex mutex;
  std::vector<std::string> messages;
  const auto run = [&] {
    run_local(4, [&](const ProcessGroup& group) {
      group.barrier();
      if (group.rank() == 2) fail(ErrorCode::not_found, "no such layer");
      try {
        group.barrier();
      } catch (const Error& error) {
        const std::lock_guard lock(mutex);
        messages.emplace_back(error.what());
        throw;
      }
    });
  };
  EXPECT_ERROR(run(), ErrorCode::not_found, "no such layer");
  ASSERT_EQ(messages.size(), 3u);
  for (const std::string& text : messages) EXPECT_THAT(text, HasSubstr("rank 2 failed: no such layer"));
}

}  // namespace
}  // namespace tessera
