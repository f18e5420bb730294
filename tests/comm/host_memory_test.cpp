// Ranks that share a host's memory: collectives through it, and the memory itself.

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <future>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "comm/host_cases.h"
#include "support/chaos.h"
#include "support/child_process.h"
#include "support/rank_processes.h"
#include "tessera/base/function_ref.h"
#include "tessera/comm/internal/shared_memory.h"
#include "tessera/comm/local_ranks.h"
#include "tessera/comm/point_to_point.h"

namespace tessera {
namespace {

using comm::SharedMemory;
using testing::expect_good_processes;
using testing::expect_sums;
using testing::quick;
using testing::values_of;

// Runs `f` on ranks that are threads, and on ranks that are processes.
void on_ranks(int ranks, FunctionRef<void(const ProcessGroup&)> f) {
  const auto run = [&](const ProcessGroup& group) {
    EXPECT_TRUE(SharedMemory::is_available(group));
    f(group);
  };
  expect_good_processes(ranks, quick(), run);
  run_local(ranks, run);
}

// The sum in the order of the ranks, rounded after each.
at::Tensor sum_in_order(int ranks, std::int64_t numel, at::ScalarType dtype) {
  at::Tensor sum = values_of(0, numel, dtype);
  for (int r = 1; r < ranks; ++r) sum.add_(values_of(r, numel, dtype));
  return sum;
}

TEST(HostMemoryTest, RanksOfAHostShareMemory) {
  on_ranks(3, [](const ProcessGroup& group) {
    EXPECT_TRUE(SharedMemory::is_available(group));
    const std::optional<ProcessGroup> pair = group.subgroup(std::vector<int>{2, 0});
    EXPECT_TRUE(!pair || SharedMemory::is_available(*pair));
    EXPECT_FALSE(SharedMemory::is_available(ProcessGroup()));
  });
}

TEST(HostMemoryTest, OneRankThatDoesNotShareKeepsAllOnTheBackend) {
  expect_good_processes(2, quick(), [](const ProcessGroup& group) {
    if (group.rank() == 1) ::setenv("TESSERA_HOST_MEMORY", "0", 1);
    const std::optional<ProcessGroup> own = group.subgroup(std::vector<int>{0, 1});
    EXPECT_FALSE(SharedMemory::is_available(*own));
    const at::Tensor x = at::ones({4});
    own->all_reduce(x);
    EXPECT_TRUE(at::equal(x, at::full({4}, 2)));
  });
}

TEST(HostMemoryTest, SumsAreInTheOrderOfTheRanksForEverySize) {
  for (const int ranks : {2, 3, 5}) {
    const std::int64_t more_than_a_ring = ranks == 2 ? 900'000 : ranks == 3 ? 400'000 : 2;  // not on 5, to save time
    on_ranks(ranks, [&](const ProcessGroup& group) {
      testing::SampleIfSanitized sample(3, static_cast<std::size_t>(ranks));
      for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
        // Within a block, several blocks, more than a ring.
        for (const std::int64_t part : {std::int64_t{1}, std::int64_t{7}, std::int64_t{33'333}, more_than_a_ring}) {
          if (!sample.takes_next()) continue;
          expect_sums(group, part, dtype, [&](std::int64_t numel) { return sum_in_order(ranks, numel, dtype); });
        }
      }
    });
  }
}

// The first number of ranks whose rings have no room for rows of the largest blocks.
TEST(HostMemoryTest, SumsOfTwelveRanks) {
  run_local(12, [](const ProcessGroup& group) {
    EXPECT_TRUE(SharedMemory::is_available(group));
    expect_sums(group, 20'000, at::kFloat, [](std::int64_t numel) { return sum_in_order(12, numel, at::kFloat); });
  });
}

TEST(HostMemoryTest, ElementsMoveWhateverTheirSizes) {
  on_ranks(3, [](const ProcessGroup& group) {
    for (const std::int64_t scale : {0, 1, 1001, 700'000}) {
      // Rank r sends (r + 2 * to) % 4 times `scale` elements to rank `to`.
      const auto count = [&](int from, int to) { return (from + 2 * to) % 4 * scale; };
      std::vector<std::int64_t> ins, outs;
      for (int r = 0; r < 3; ++r) {
        ins.push_back(count(group.rank(), r));
        outs.push_back(count(r, group.rank()));
      }
      const auto sum = [](const std::vector<std::int64_t>& all) {
        return std::accumulate(all.begin(), all.end(), std::int64_t{0});
      };
      const at::Tensor in = at::arange(sum(ins), at::kInt).add(1000 * group.rank()),
                       out = at::empty({sum(outs)}, at::kInt);
      group.start_all_to_all(out, in, outs, ins).wait();
      std::vector<at::Tensor> expected;
      for (int from = 0; from < 3; ++from) {
        std::int64_t begin = 0;
        for (int to = 0; to < group.rank(); ++to) begin += count(from, to);
        expected.push_back(at::arange(begin, begin + count(from, group.rank()), at::kInt).add(1000 * from));
      }
      EXPECT_TRUE(at::equal(out, at::cat(expected))) << scale;
    }
    const at::Tensor sent = values_of(1, 3'000'001), received = group.rank() == 1 ? sent.clone() : at::zeros_like(sent);
    group.broadcast(received, 1);
    EXPECT_TRUE(at::equal(received, sent));
    const at::Tensor all = at::empty({3 * 1'500'001});
    group.all_gather_into(all, values_of(group.rank(), 1'500'001));
    EXPECT_TRUE(at::equal(all, at::cat({values_of(0, 1'500'001), values_of(1, 1'500'001), values_of(2, 1'500'001)})));
  });
}

// No ring has room for all, and each rank waits in another order.
TEST(HostMemoryTest, ManyCollectivesMayPend) {
  constexpr int kCount = 12;
  constexpr std::int64_t kNumel = 500'000;
  const auto run = [](const ProcessGroup& group) {
    std::vector<at::Tensor> results;
    std::vector<PendingCollective> pending;
    for (int i = 0; i < kCount; ++i) {
      at::Tensor& result = results.emplace_back(values_of(group.rank() + i, kNumel));
      if (i % 2 == 0) {
        pending.push_back(group.start_all_reduce(result));
      } else {
        const at::Tensor all = at::empty({group.size() * kNumel});
        pending.push_back(group.start_all_gather_into(all, std::exchange(result, all)));
      }
    }
    for (int i = 0; i < kCount; ++i) pending[static_cast<std::size_t>((7 * i + 5 * group.rank()) % kCount)].wait();
    for (int i = 0; i < kCount; ++i) {
      std::vector<at::Tensor> of_ranks;
      for (int r = 0; r < group.size(); ++r) of_ranks.push_back(values_of(i + r, kNumel));
      at::Tensor sum = of_ranks[0];
      for (int r = 1; r < group.size(); ++r) sum = sum + of_ranks[static_cast<std::size_t>(r)];
      EXPECT_TRUE(at::equal(results[static_cast<std::size_t>(i)], i % 2 == 0 ? sum : at::cat(of_ranks))) << i;
    }
  };
  on_ranks(2, run);
  on_ranks(3, run);
}

// Rank 0 waits elsewhere, while rank 1 waits for what no ring has room for.
TEST(HostMemoryTest, ARankThatWaitsElsewhereAdvancesWhatItHasStarted) {
  on_ranks(2, [](const ProcessGroup& group) {
    const std::optional<ProcessGroup> other = group.subgroup(std::vector<int>{0, 1});
    const at::Tensor own = values_of(group.rank(), 3'000'000), all = at::empty({6'000'000}), x = at::ones({3});
    for (const bool is_message : {false, true}) {
      const auto meet = [&] {
        if (!is_message) return other->start_all_reduce(x).wait();
        if (group.rank() == 0) receive_bytes(group, 1);
        if (group.rank() == 1) send_bytes(group, {}, 0);
      };
      PendingCollective gathering = group.start_all_gather_into(all, own);
      if (group.rank() == 0) meet();
      gathering.wait();
      if (group.rank() == 1) meet();
      EXPECT_TRUE(at::equal(all, at::cat({values_of(0, 3'000'000), values_of(1, 3'000'000)})));
    }
  });
}

TEST(HostMemoryTest, MoreRanksThanProcessors) {
  expect_good_processes(9, quick(), [](const ProcessGroup& group) {
    at::Tensor x = at::ones({100}, at::kLong);
    for (int i = 0; i < 5; ++i) group.start_all_reduce(x).wait();
    EXPECT_EQ(x[99].item<std::int64_t>(), 9 * 9 * 9 * 9 * 9);
  });
}

TEST(HostMemoryTest, ARankThatIsStoppedIsWaitedFor) {
  InitOptions options;
  options.liveness = std::chrono::seconds(30);
  const auto outcomes = testing::run_processes(2, options, [](const ProcessGroup& group) {
    at::Tensor pid = at::full({1}, group.rank() == 1 ? ::getpid() : 0, at::kLong);
    group.all_reduce(pid);
    const at::Tensor x = values_of(group.rank(), 2'000'000);
    if (group.rank() == 0) {
      ::kill(static_cast<pid_t>(pid.item<std::int64_t>()), SIGSTOP);
      std::thread([stopped = static_cast<pid_t>(pid.item<std::int64_t>())] {
        std::this_thread::sleep_for(std::chrono::seconds(5));
        ::kill(stopped, SIGCONT);
      }).detach();
    }
    const auto begin = std::chrono::steady_clock::now();
    group.start_all_reduce(x).wait();
    const bool has_waited = std::chrono::steady_clock::now() - begin > std::chrono::seconds(4);
    if (group.rank() == 0 && !has_waited) return std::string("did not wait");
    return std::string(at::equal(x, sum_in_order(2, 2'000'000, at::kFloat)) ? "good" : "wrong sum");
  });
  for (const testing::RankOutcome& outcome : outcomes) EXPECT_EQ(outcome.report, "good");
}

TEST(HostMemoryTest, ARankThatIsKilledIsNamed) {
  for (int instant = 0; instant < 4; ++instant) {
    const auto outcomes = testing::run_processes(3, quick(), [&](const ProcessGroup& group) {
      const auto memory = SharedMemory::make(group, 1 << 20, true);
      at::Tensor x = values_of(group.rank(), 3'000'000);
      if (group.rank() == 1) {
        std::thread([instant] {
          std::this_thread::sleep_for(std::chrono::milliseconds(5 * instant));
          ::kill(::getpid(), SIGKILL);
        }).detach();
      }
      for (;;) {
        group.start_all_reduce(x).wait();
        SharedMemory::start_meeting(group, "meeting", true).wait();
      }
      return std::string("ended");
    });
    EXPECT_EQ(outcomes[1].signal, SIGKILL);
    for (const std::size_t rank : {0u, 2u}) {
      EXPECT_THAT(outcomes[rank].report, ::testing::StartsWith("rank_failure: "));
      EXPECT_THAT(outcomes[rank].report, ::testing::HasSubstr("rank 1 "));
    }
  }
}

// A process that closes any descriptor of the memory loses its locks, by which others know that it lives.
TEST(HostMemoryTest, RanksThatAreThreadsOfASecondProcessAreAlive) {
  InitOptions options = quick();
  options.world_size = 3;
  options.master_port = free_port();
  const auto run = [options](int rank) {
    InitOptions own = options;
    own.rank = rank;
    const ProcessGroup group = init_process_group(own);
    const at::Tensor x = at::ones({3});
    for (int late = 1; late < 3; ++late) {
      // The others look whether it lives.
      if (rank == late) std::this_thread::sleep_for(std::chrono::milliseconds(100));
      group.start_all_reduce(x).wait();
    }
    if (!at::equal(x, at::full({3}, 9, at::kFloat))) throw std::runtime_error("wrong sum");
  };
  const pid_t second = testing::start_child([&] {
    std::future<void> other = std::async(std::launch::async, run, 2);
    run(1);
    other.get();
  });
  EXPECT_NO_THROW(run(0));
  EXPECT_EQ(testing::wait_for_child(second), 0);
}

// Such a rank is not found dead.
TEST(HostMemoryTest, ARankThatLeavesIsNamedLongBeforeTheTimeout) {
  const auto begin = std::chrono::steady_clock::now();
  const auto outcomes = testing::run_processes(2, quick(), [](const ProcessGroup& group) {
    if (group.rank() == 0) group.start_all_reduce(at::ones({3})).wait();
    return std::string("ended");
  });
  EXPECT_THAT(outcomes[0].report, ::testing::StartsWith("rank_failure: "));
  EXPECT_THAT(outcomes[0].report, ::testing::HasSubstr("rank 1 left the group"));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, testing::kSoon);
}

TEST(HostMemoryTest, WhatRanksWriteIsSeenAfterAMeeting) {
  constexpr std::int64_t kNumel = 100'000;
  on_ranks(3, [](const ProcessGroup& group) {
    const auto memory = SharedMemory::make(group, 3 * kNumel * sizeof(float), true);
    ASSERT_NE(memory, nullptr);
    const at::Tensor own =
        memory->tensor(static_cast<std::size_t>(group.rank()) * kNumel * sizeof(float), kNumel, at::kFloat);
    const at::Tensor all = at::from_blob(memory->view()->data(), {3, kNumel});
    EXPECT_EQ(all.abs().sum().item<float>(), 0);
    SharedMemory::start_meeting(group, "meeting", true).wait();
    for (int round = 1; round < 20; ++round) {
      own.fill_(round * (group.rank() + 1));
      SharedMemory::start_meeting(group, "meeting", true).wait();
      for (int r = 0; r < 3; ++r) EXPECT_TRUE(at::equal(all[r], at::full({kNumel}, round * (r + 1), at::kFloat)));
      SharedMemory::start_meeting(group, "meeting", true).wait();
    }
  });
}

TEST(HostMemoryTest, WritesToAViewAreOwnUntilTheyAreDropped) {
  constexpr std::int64_t kNumel = 700'000;  // more pages than are looked at in one call
  on_ranks(2, [](const ProcessGroup& group) {
    const auto memory = SharedMemory::make(group, kNumel * sizeof(float), true);
    const at::Tensor mine = at::from_blob(memory->view()->data(), {kNumel}),
                     shared = memory->tensor(0, kNumel, at::kFloat);
    mine[kNumel - 1] = 1 + group.rank();
    mine[5] = 7;
    group.barrier();
    EXPECT_EQ(mine[kNumel - 1].item<float>(), static_cast<float>(1 + group.rank()));
    EXPECT_EQ(shared.abs().sum().item<float>(), 0);
    group.barrier();
    if (group.rank() == 0) shared.fill_(3);
    group.barrier();
    EXPECT_EQ(mine[5].item<float>(), 7);
    memory->view()->drop_writes();
    EXPECT_TRUE(at::equal(mine, at::full({kNumel}, 3, at::kFloat)));
    group.barrier();
  });
}

TEST(HostMemoryTest, AConjugatedPieceIsReducedAsItsValues) {
  run_local(2, [](const ProcessGroup& group) {
    const at::Tensor x = at::complex(at::arange(4, at::kFloat), at::arange(4, 8, at::kFloat)).conj(),
                     out = at::empty({2}, at::kComplexFloat);
    SharedMemory::start_reduce_scatter(group, out, std::vector<SharedMemory::Piece>{{x, 4}}, ReduceOp::sum).wait();
    EXPECT_TRUE(at::equal(out, x.narrow(0, 2 * group.rank(), 2).mul(2).resolve_conj()));
  });
}

TEST(HostMemoryTest, MemoryThatOneRankDoesNotWantIsMadeOnNone) {
  on_ranks(2, [](const ProcessGroup& group) {
    EXPECT_EQ(SharedMemory::make(group, 100, group.rank() == 0), nullptr);
    EXPECT_NE(SharedMemory::make(group, 100, true), nullptr);
  });
}

}  // namespace
}  // namespace tessera
