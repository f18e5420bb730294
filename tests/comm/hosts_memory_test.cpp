// Ranks on several hosts: within a host through its memory, between hosts through c10d. What is one host here, is told
// by TESSERA_HOST_MEMORY.

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "comm/host_cases.h"
#include "support/chaos.h"
#include "support/rank_processes.h"
#include "tessera/base/function_ref.h"
#include "tessera/comm/internal/shared_memory.h"

namespace tessera {
namespace {

using testing::expect_good_processes;
using testing::expect_sums;
using testing::quick;
using testing::values_of;
using Hosts = std::vector<std::vector<int>>;

const Hosts kInOrder = {{0, 1}, {2, 3}}, kInterleaved = {{0, 2}, {1, 3}}, kThree = {{0, 5}, {1, 2}, {3, 4}};

// Returns the group of all ranks, on these hosts.
ProcessGroup group_on(const ProcessGroup& world, const Hosts& hosts) {
  for (std::size_t h = 0; h < hosts.size(); ++h) {
    if (std::count(hosts[h].begin(), hosts[h].end(), world.rank()) > 0)
      ::setenv("TESSERA_HOST_MEMORY", ("host " + std::to_string(h)).c_str(), 1);
  }
  std::vector<int> ranks(static_cast<std::size_t>(world.size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return *world.subgroup(ranks);
}

void on_hosts(const Hosts& hosts, FunctionRef<void(const ProcessGroup&)> f) {
  int ranks = 0;
  for (const std::vector<int>& of_host : hosts) ranks += static_cast<int>(of_host.size());
  expect_good_processes(ranks, quick(), [&](const ProcessGroup& world) { f(group_on(world, hosts)); });
}

// The sum of the hosts' sums, each in order, rounded after each addition.
at::Tensor sum_of(const Hosts& hosts, std::int64_t numel, at::ScalarType dtype) {
  at::Tensor sum;
  for (const std::vector<int>& ranks : hosts) {
    at::Tensor of_host;
    for (const int r : ranks) {
      const at::Tensor values = values_of(r, numel, dtype);
      of_host = of_host.defined() ? of_host + values : values;
    }
    sum = sum.defined() ? sum + of_host : of_host;
  }
  return sum;
}

TEST(HostsMemoryTest, SumsAreThoseOfTheHostsInTheirOrder) {
  std::size_t round = 0;
  for (const Hosts& hosts : {kInOrder, kInterleaved, kThree}) {
    ++round;
    on_hosts(hosts, [&](const ProcessGroup& group) {
      EXPECT_FALSE(comm::SharedMemory::is_available(group));
      testing::SampleIfSanitized sample(3, round);
      for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kLong}) {
        for (const std::int64_t part : {1, 7, 3'333, 200'001}) {
          if (!sample.takes_next()) continue;
          expect_sums(group, part, dtype, [&](std::int64_t numel) { return sum_of(hosts, numel, dtype); });
        }
      }
      const at::Tensor average = values_of(group.rank(), 1001), most = values_of(group.rank(), 100'001),
                       one = at::full({1}, group.rank() + 1, at::kLong);
      group.all_reduce(average, ReduceOp::average);
      EXPECT_TRUE(at::equal(average, sum_of(hosts, 1001, at::kFloat) / group.size()));
      group.all_reduce(one, ReduceOp::product);
      std::int64_t product = 1;
      for (int r = 1; r <= group.size(); ++r) product *= r;
      EXPECT_EQ(one.item<std::int64_t>(), product);
      group.all_reduce(most, ReduceOp::max);
      at::Tensor expected = values_of(0, 100'001);
      for (int r = 1; r < group.size(); ++r) expected = at::maximum(expected, values_of(r, 100'001));
      EXPECT_TRUE(at::equal(most, expected));
    });
  }
}

TEST(HostsMemoryTest, ElementsMoveWhateverTheirSizes) {
  for (const Hosts& hosts : {kInOrder, kInterleaved, kThree}) {
    on_hosts(hosts, [&](const ProcessGroup& group) {
      const int size = group.size();
      for (const std::int64_t scale : {0, 1, 1001, 200'000}) {
        // Rank r sends (r + 2 * to) % 4 times `scale` elements to rank `to`.
        const auto count = [&](int from, int to) { return (from + 2 * to) % 4 * scale; };
        std::vector<std::int64_t> ins, outs;
        std::vector<at::Tensor> expected;
        for (int r = 0; r < size; ++r) {
          ins.push_back(count(group.rank(), r));
          outs.push_back(count(r, group.rank()));
          std::int64_t begin = 0;
          for (int to = 0; to < group.rank(); ++to) begin += count(r, to);
          expected.push_back(at::arange(begin, begin + outs.back(), at::kInt).add(1'000'000 * r));
        }
        const auto sum = [](const std::vector<std::int64_t>& all) {
          return std::accumulate(all.begin(), all.end(), std::int64_t{0});
        };
        const at::Tensor in = at::arange(sum(ins), at::kInt).add(1'000'000 * group.rank()),
                         out = at::empty({sum(outs)}, at::kInt);
        group.start_all_to_all(out, in, outs, ins).wait();
        EXPECT_TRUE(at::equal(out, at::cat(expected))) << scale;
      }
      testing::SampleIfSanitized sample(5);
      for (const std::int64_t numel : {1, 3, 1'000'001}) {
        for (int root = 0; root < size; ++root) {
          if (!sample.takes_next()) continue;
          const at::Tensor sent = values_of(root, numel), received = at::zeros({numel});
          if (group.rank() == root) received.copy_(sent);
          group.broadcast(received, root);
          EXPECT_TRUE(at::equal(received, sent)) << numel << " from " << root;
        }
        std::vector<at::Tensor> of_all;
        for (int r = 0; r < size; ++r) of_all.push_back(values_of(r, numel));
        const at::Tensor all = at::empty({size * numel});
        group.all_gather_into(all, values_of(group.rank(), numel));
        EXPECT_TRUE(at::equal(all, at::cat(of_all))) << numel;
      }
      group.barrier();
    });
  }
}

// Each rank waits in another order, and no ring has room for all.
TEST(HostsMemoryTest, ManyCollectivesMayPend) {
  constexpr int kCount = 15;
  constexpr std::int64_t kNumel = 300'000;
  on_hosts(kInterleaved, [](const ProcessGroup& group) {
    std::vector<at::Tensor> results, kept;
    std::vector<PendingCollective> pending;
    for (int i = 0; i < kCount; ++i) {
      const at::Tensor own = kept.emplace_back(values_of(group.rank() + i, 4 * kNumel));
      if (i % 3 == 0) {
        pending.push_back(group.start_all_reduce(results.emplace_back(own.clone())));
      } else if (i % 3 == 1) {
        pending.push_back(group.start_all_gather_into(results.emplace_back(at::empty({16 * kNumel})), own));
      } else {
        pending.push_back(group.start_reduce_scatter_into(results.emplace_back(at::empty({kNumel})), own));
      }
    }
    for (int i = 0; i < kCount; ++i) pending[static_cast<std::size_t>((7 * i + 4 * group.rank()) % kCount)].wait();
    for (int i = 0; i < kCount; ++i) {
      std::vector<at::Tensor> of;
      for (int r = 0; r < 4; ++r) of.push_back(values_of(r + i, 4 * kNumel));
      const at::Tensor sum = (of[0] + of[2]) + (of[1] + of[3]);
      const at::Tensor& result = results[static_cast<std::size_t>(i)];
      const at::Tensor expected = i % 3 == 0   ? sum
                                  : i % 3 == 1 ? at::cat(of)
                                               : sum.narrow(0, group.rank() * kNumel, kNumel);
      EXPECT_TRUE(at::equal(result, expected)) << i;
    }
  });
}

TEST(HostsMemoryTest, HostsWithDifferentNumbersOfRanksStayOnTheBackend) {
  on_hosts({{0, 1}, {2}}, [](const ProcessGroup& group) {
    const at::Tensor x = at::full({1001}, group.rank() + 1);
    group.all_reduce(x);
    EXPECT_TRUE(at::equal(x, at::full({1001}, 6)));
  });
}

TEST(HostsMemoryTest, ARankThatIsKilledIsNamedOnAllHosts) {
  for (const int instant : {0, 7, 20}) {
    const auto outcomes = testing::run_processes(4, quick(), [&](const ProcessGroup& world) {
      const ProcessGroup group = group_on(world, kInOrder);
      const at::Tensor x = values_of(group.rank(), 1'000'000);
      if (group.rank() == 1) {
        std::thread([instant] {
          std::this_thread::sleep_for(std::chrono::milliseconds(instant));
          ::kill(::getpid(), SIGKILL);
        }).detach();
      }
      for (;;) group.start_all_reduce(x).wait();
      return std::string("ended");
    });
    EXPECT_EQ(outcomes[1].signal, SIGKILL);
    for (const std::size_t rank : {0u, 2u, 3u}) {
      EXPECT_THAT(outcomes[rank].report, ::testing::StartsWith("rank_failure: "));
      EXPECT_THAT(outcomes[rank].report, ::testing::HasSubstr("rank 1 "));
    }
  }
}

// A collective that starts after the link to a dead rank has failed is none that this rank refuses.
TEST(HostsMemoryTest, ARankThatIsKilledIsNamedByCollectivesThatStartAfterIt) {
  const auto outcomes = testing::run_processes(4, quick(), [&](const ProcessGroup& world) {
    const ProcessGroup group = group_on(world, kInOrder);
    const at::Tensor x = values_of(group.rank(), 1000), y = x.clone();
    group.all_reduce(x);
    if (group.rank() == 1) ::kill(::getpid(), SIGKILL);
    PendingCollective first = group.start_all_reduce(x);
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    PendingCollective second = group.start_all_reduce(y);
    first.wait();
    second.wait();
    return std::string("ended");
  });
  for (const std::size_t rank : {0u, 2u, 3u}) {
    EXPECT_THAT(outcomes[rank].report, ::testing::StartsWith("rank_failure: all_reduce"));
    EXPECT_THAT(outcomes[rank].report, ::testing::HasSubstr("rank 1 "));
  }
}

}  // namespace
}  // namespace tessera
