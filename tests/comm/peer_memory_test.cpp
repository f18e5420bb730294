#include "tessera/comm/internal/peer_memory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/uio.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <numeric>

#include "support/child_process.h"
#include "support/error_matchers.h"
#include "support/rank_processes.h"
#include "tessera/comm/local_ranks.h"

namespace tessera::comm {
namespace {

using ::testing::HasSubstr;
using testing::RankOutcome;
using testing::run_processes;

using Numbers = std::vector<std::uint32_t>;

// Numbers that differ on each rank.
Numbers numbers_of(int rank, std::size_t count) {
  Numbers numbers(count);
  std::iota(numbers.begin(), numbers.end(), static_cast<std::uint32_t>(rank) << 24);
  return numbers;
}

std::vector<std::uint64_t> address_of(const Numbers& numbers) {
  return {reinterpret_cast<std::uintptr_t>(numbers.data())};
}

// Returns all numbers at `address` as ranges of `each` numbers.
std::vector<iovec> stretches(std::uint64_t address, std::size_t count, std::size_t each) {
  std::vector<iovec> all;
  for (std::size_t i = 0; i < count; i += each) {
    all.push_back({reinterpret_cast<void*>(address + i * sizeof(std::uint32_t)),
                   std::min(each, count - i) * sizeof(std::uint32_t)});
  }
  return all;
}

// Returns whether this rank reads the numbers of every other rank.
bool reads_all(const ProcessGroup& group) {
  constexpr std::size_t kCount = 10007;
  const Numbers mine = numbers_of(group.rank(), kCount);
  bool are_right = true;
  const PeerMemory peers(group, address_of(mine));
  for (int rank = 0; rank < group.size(); ++rank) {
    // More ranges than a system call takes, divided differently on both sides.
    for (const auto& [to_each, from_each] : {std::pair{kCount, kCount}, {kCount, 3}, {5, kCount}, {2, 7}}) {
      Numbers seen(kCount);
      peers.read(rank, stretches(address_of(seen)[0], kCount, to_each),
                 stretches(peers.addresses(rank)[0], kCount, from_each));
      are_right = are_right && seen == numbers_of(rank, kCount);
    }
    peers.read(rank, {}, {});
  }
  peers.finish();
  return are_right;
}

// Asks the kernel whether one of two processes may read the memory of the other.
bool kernel_allows_it() {
  const std::uint32_t number = 17;
  const pid_t owner = testing::start_child([] {
    for (;;) ::pause();
  });
  const pid_t reader = testing::start_child([&] {
    std::uint32_t seen = 0;
    const iovec to{&seen, sizeof seen}, from{const_cast<std::uint32_t*>(&number), sizeof number};
    if (::process_vm_readv(owner, &to, 1, &from, 1, 0) != sizeof seen || seen != number) ::_exit(1);
  });
  const bool is_read = testing::wait_for_child(reader) == 0;
  ::kill(owner, SIGKILL);
  testing::wait_for_child(owner);
  return is_read;
}

InitOptions quick() {
  InitOptions options;
  options.liveness = std::chrono::seconds(1);
  options.timeout = std::chrono::seconds(60);
  return options;
}

TEST(PeerMemoryTest, ProcessesReadEachOther) {
  if (!kernel_allows_it()) GTEST_SKIP() << "the kernel does not let processes read each other's memory";
  for (const RankOutcome& outcome : run_processes(3, quick(), [](const ProcessGroup& group) {
         if (!PeerMemory::is_available(group)) return std::string("not available");
         return std::string(reads_all(group) && reads_all(group) ? "good" : "wrong");
       })) {
    EXPECT_EQ(outcome.report, "good");
  }
}

TEST(PeerMemoryTest, ThreadsReadEachOther) {
  run_local(4, [](const ProcessGroup& group) {
    ASSERT_TRUE(PeerMemory::is_available(group));
    EXPECT_TRUE(reads_all(group));
    const int some[] = {3, 1};
    const std::optional<ProcessGroup> subgroup = group.subgroup(some);
    if (subgroup) {
      EXPECT_TRUE(PeerMemory::is_available(*subgroup) && reads_all(*subgroup));
    }
  });
}

TEST(PeerMemoryTest, IsNotForOneRank) { EXPECT_FALSE(PeerMemory::is_available(ProcessGroup())); }

TEST(PeerMemoryTest, OneRankThatDoesNotWantItIsEnough) {
  for (const RankOutcome& outcome : run_processes(3, quick(), [](const ProcessGroup& group) {
         if (group.rank() == 2) ::setenv("TESSERA_PEER_MEMORY", "0", 1);
         const bool is_available = PeerMemory::is_available(group);
         group.barrier();
         return std::string(is_available ? "available" : "not available");
       })) {
    EXPECT_EQ(outcome.report, "not available");
  }
}

TEST(PeerMemoryTest, ARankThatDiesIsNamed) {
  if (!kernel_allows_it()) GTEST_SKIP() << "the kernel does not let processes read each other's memory";
  const std::vector<RankOutcome> outcomes = run_processes(3, quick(), [](const ProcessGroup& group) {
    if (!PeerMemory::is_available(group)) return std::string("not available");
    const Numbers mine = numbers_of(group.rank(), 100);
    const PeerMemory peers(group, address_of(mine));
    group.barrier();
    if (group.rank() == 1) ::kill(::getpid(), SIGKILL);
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    if (group.rank() == 0) {
      Numbers seen(100);
      peers.read(1, stretches(address_of(seen)[0], 100, 100), stretches(peers.addresses(1)[0], 100, 100));
    }
    peers.finish();
    return std::string("nothing happened");
  });
  EXPECT_THAT(outcomes[0].report, ::testing::StartsWith("rank_failure: read_peer_memory on rank 0 of 3"));
  for (const std::size_t rank : {0u, 2u}) EXPECT_THAT(outcomes[rank].report, HasSubstr("rank 1 died"));
}

}  // namespace
}  // namespace tessera::comm
