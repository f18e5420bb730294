// RPC between processes: who may initialize it, tensors that ranks share, and how it ends.

#include "tessera/comm/rpc.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>
#include <sstream>
#include <string>
#include <thread>

#include "support/error_matchers.h"
#include "support/rank_processes.h"
#include "support/temporary_directory.h"
#include "support/tensorpipe.h"
#include "tessera/comm/local_ranks.h"

namespace tessera {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::expect_good_processes;
using ::testing::HasSubstr;
using testing::kLongTimeout;
using testing::kSoon;
using testing::quick;
using testing::RankOutcome;
using testing::run_processes;
using testing::soon;
using ::testing::StartsWith;

RpcOptions quick_rpc(const std::string& name = "") {
  RpcOptions options;
  options.name = name;
  options.timeout = kLongTimeout;
  options.threads = 2;
  return options;
}

class RpcTest : public ::testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    if (!testing::libtorch_has_tensorpipe()) GTEST_SKIP() << "this LibTorch was built without TensorPipe";
    ASSERT_TRUE(is_rpc_available());
  }
  int world() const { return GetParam(); }
};
INSTANTIATE_TEST_SUITE_P(Worlds, RpcTest, ::testing::Values(1, 2, 3, 4));

// Tests that need another rank.
class RpcOfSeveralTest : public RpcTest {};
INSTANTIATE_TEST_SUITE_P(Worlds, RpcOfSeveralTest, ::testing::Values(2, 3, 4));

// The i-th of r tensors that rank r shares: uneven, and none from rank 0.
at::Tensor tensor_of(int rank, int i) { return at::full({rank + i, 2}, 10 * rank + i, at::kInt); }

std::vector<at::Tensor> tensors_of(int rank) {
  std::vector<at::Tensor> tensors;
  for (int i = 0; i < rank; ++i) tensors.push_back(tensor_of(rank, i));
  return tensors;
}

TEST_P(RpcTest, EveryRankFetchesWhatEveryOtherShares) {
  expect_good_processes(world(), quick(), [&](const ProcessGroup& group) {
    EXPECT_FALSE(is_rpc_initialized());
    Rpc rpc = init_rpc(group, quick_rpc());
    EXPECT_TRUE(is_rpc_initialized());
    EXPECT_EQ(rpc_rank(), group.rank());
    EXPECT_EQ(find_rpc_worker("worker" + std::to_string(world() - 1)), world() - 1);
    EXPECT_EQ(find_rpc_worker("unknown"), std::nullopt);
    const auto shared = share_tensors(group, tensors_of(group.rank()));
    ASSERT_EQ(shared.size(), static_cast<std::size_t>(world()));
    for (int r = 0; r < world(); ++r) {
      const std::vector<RemoteTensor>& of_rank = shared[static_cast<std::size_t>(r)];
      ASSERT_EQ(of_rank.size(), static_cast<std::size_t>(r == group.rank() ? 0 : r));
      for (int i = 0; i < static_cast<int>(of_rank.size()); ++i) {
        EXPECT_EQ(of_rank[static_cast<std::size_t>(i)].owner(), r);
        EXPECT_TRUE(at::equal(of_rank[static_cast<std::size_t>(i)].fetch(), tensor_of(r, i)));
      }
    }
    rpc.shutdown();
    EXPECT_FALSE(is_rpc_initialized());
    rpc.shutdown();  // no-op
  });
}

// The TCP ports at which this process listens.
std::set<std::string> open_ports() {
  std::set<std::string> sockets, ports;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code closed;
    sockets.insert(std::filesystem::read_symlink(entry, closed).string());
  }
  for (const char* table : {"/proc/self/net/tcp", "/proc/self/net/tcp6"}) {
    std::ifstream file(table);
    for (std::string line; std::getline(file, line);) {
      std::istringstream words(line);
      const std::vector<std::string> fields(std::istream_iterator<std::string>(words), {});
      constexpr char kListens[] = "0A";
      if (fields.size() < 10 || fields[3] != kListens) continue;
      if (sockets.count("socket:[" + fields[9] + "]") != 0) ports.insert(fields[1]);
    }
  }
  return ports;
}

// Through a port, a worker of another job that looks for a dead one would end this process.
TEST_P(RpcTest, WorkersOfOneHostOpenNoPort) {
  ::setenv("TESSERA_HOST_MEMORY", "1", /*replace=*/1);
  expect_good_processes(world(), quick(), [&](const ProcessGroup& group) {
    const std::set<std::string> before = open_ports();
    EXPECT_EQ(before.size(), group.rank() == 0 && world() > 1 ? 1u : 0u);  // the store's
    Rpc rpc = init_rpc(group, quick_rpc());
    const std::vector<at::Tensor> mine = {at::ones({1 << 16})};
    for (const auto& of_rank : share_tensors(group, mine)) {
      for (const RemoteTensor& tensor : of_rank) tensor.fetch();
    }
    EXPECT_EQ(open_ports(), before);
    rpc.shutdown();
  });
}

TEST_P(RpcTest, AFetchedTensorIsACopyOfWhatTheOwnerHasNow) {
  expect_good_processes(world(), quick(), [&](const ProcessGroup& group) {
    Rpc rpc = init_rpc(group, quick_rpc());
    const std::vector<at::Tensor> mine = {at::zeros({3}).set_requires_grad(true)};
    const auto shared = share_tensors(group, mine);
    mine[0].detach().fill_(group.rank() + 1);
    group.barrier();
    for (int r = 0; r < world(); ++r) {
      if (r == group.rank()) continue;
      const at::Tensor fetched = shared[static_cast<std::size_t>(r)].at(0).fetch();
      EXPECT_TRUE(at::equal(fetched, at::full({3}, r + 1, at::kFloat)));
      EXPECT_TRUE(fetched.requires_grad());
      EXPECT_TRUE(fetched.is_leaf());
      fetched.detach().fill_(-1);
      EXPECT_TRUE(at::equal(shared[static_cast<std::size_t>(r)].at(0).fetch(), at::full({3}, r + 1, at::kFloat)));
    }
    rpc.shutdown();
  });
}

// The tensor is freed when the last of the owner and the references releases it.
TEST_P(RpcTest, ATensorLivesAsLongAsOwnerOrReferences) {
  expect_good_processes(world(), quick(), [&](const ProcessGroup& group) {
    Rpc rpc = init_rpc(group, quick_rpc());
    std::vector<at::Tensor> mine = {at::full({5}, group.rank())};
    const c10::weak_intrusive_ptr<c10::TensorImpl> alive(mine[0].getIntrusivePtr());
    auto shared = share_tensors(group, mine);
    mine.clear();
    EXPECT_EQ(alive.expired(), world() == 1);
    group.barrier();
    for (int r = 0; r < world(); ++r) {  // the ranks release theirs one after another
      if (r == group.rank()) {
        auto copies = shared;
        shared.clear();
        for (const auto& of_rank : copies) {
          for (const RemoteTensor& tensor : of_rank) {
            EXPECT_TRUE(at::equal(tensor.fetch(), at::full({5}, tensor.owner())));
          }
        }
      }
      const bool others_remain =
          world() > 1 && !(r == world() - 1 || (r == world() - 2 && group.rank() == world() - 1));
      group.barrier();
      if (others_remain) {
        EXPECT_FALSE(alive.expired());
      } else {
        EXPECT_TRUE(soon([&] { return alive.expired(); }));
      }
      group.barrier();
    }
    rpc.shutdown();
  });
}

TEST_P(RpcTest, ShutdownFreesWhatReferencesStillKeep) {
  expect_good_processes(world(), quick(), [&](const ProcessGroup& group) {
    Rpc rpc = init_rpc(group, quick_rpc());
    std::vector<at::Tensor> mine = {at::ones({5})};
    const c10::weak_intrusive_ptr<c10::TensorImpl> alive(mine[0].getIntrusivePtr());
    const auto shared = share_tensors(group, mine);
    mine.clear();
    const auto begin = std::chrono::steady_clock::now();
    rpc.shutdown();
    EXPECT_LT(std::chrono::steady_clock::now() - begin, kSoon);  // the ranks notified each other
    EXPECT_TRUE(alive.expired());
    for (const auto& of_rank : shared) {
      for (const RemoteTensor& tensor : of_rank) {
        EXPECT_ERROR(tensor.fetch(), ErrorCode::invalid_argument, "fetch a tensor: RPC is not initialized");
      }
    }
  });
}

TEST_P(RpcTest, CanBeInitializedOnceInAProcess) {
  expect_good_processes(world(), quick(), [&](const ProcessGroup& group) {
    Rpc rpc = init_rpc(group, quick_rpc());
    EXPECT_ERROR(init_rpc(group, quick_rpc()), ErrorCode::unsupported, "in this process, expected once");
    rpc.shutdown();
    EXPECT_ERROR(init_rpc(group, quick_rpc()), ErrorCode::unsupported, "in this process, expected once");
  });
}

TEST_P(RpcOfSeveralTest, RanksThatAreThreadsCannotShareAnAgent) {
  EXPECT_ERROR(run_local(world(), [](const ProcessGroup& group) { init_rpc(group, quick_rpc()).shutdown(); }),
               ErrorCode::unsupported, "init rpc", "which ranks that are threads cannot share");
  EXPECT_FALSE(is_rpc_initialized());
}

TEST_P(RpcTest, WhatIsWrongOnOneRankIsAnErrorOnAll) {
  expect_good_processes(world(), quick(), [&](const ProcessGroup& group) {
    const bool is_last = group.rank() == world() - 1;
    const std::string who = world() == 1 ? "" : "rank " + std::to_string(world() - 1) + ": ";
    const auto refuse = [&](const RpcOptions& options, const std::string& what) {
      EXPECT_ERROR(init_rpc(group, is_last ? options : quick_rpc()), ErrorCode::invalid_argument, who + what);
    };
    refuse(quick_rpc("a/b"), "worker name 'a/b', expected at most 128 letters");
    refuse(quick_rpc(std::string(200, 'a')), "worker name 'aaa");
    RpcOptions options = quick_rpc();
    options.timeout = milliseconds(0);
    refuse(options, "timeout 0 ms, 2 threads");
    options = quick_rpc();
    options.threads = 0;
    refuse(options, "timeout 300000 ms, 0 threads");
    if (world() > 1) {
      EXPECT_ERROR(init_rpc(group, quick_rpc("me")), ErrorCode::invalid_argument,
                   "init rpc: ranks 0 and 1 are both named 'me'");
    }
    init_rpc(group, quick_rpc()).shutdown();  // RPC is still usable
  });
}

TEST_P(RpcTest, SharingNeedsRpcOnEveryRank) {
  expect_good_processes(world(), quick(), [&](const ProcessGroup& group) {
    const std::vector<at::Tensor> mine = {at::ones({2})};
    EXPECT_ERROR(share_tensors(group, mine), ErrorCode::invalid_argument, "share tensors by RPC",
                 "RPC is not initialized, expected a call of init_rpc before");
    EXPECT_ERROR(rpc_rank(), ErrorCode::invalid_argument, "RPC is not initialized");
    EXPECT_ERROR(find_rpc_worker("worker0"), ErrorCode::invalid_argument, "RPC is not initialized");
    if (world() < 3) return;
    const int first_two[] = {0, 1};
    const std::optional<ProcessGroup> pair = group.subgroup(first_two);
    std::optional<Rpc> rpc;
    if (pair) rpc.emplace(init_rpc(*pair, quick_rpc()));
    EXPECT_ERROR(share_tensors(group, mine), ErrorCode::invalid_argument, "rank 0: world rank 2 is not an RPC worker",
                 "rank 2: share tensors by RPC: RPC is not initialized");
    if (pair) {
      EXPECT_TRUE(
          at::equal(share_tensors(*pair, mine)[static_cast<std::size_t>(1 - pair->rank())].at(0).fetch(), mine[0]));
      rpc->shutdown();
    }
  });
}

TEST_P(RpcOfSeveralTest, RanksOfTheWorldAndOfRpcMustBeTheSame) {
  expect_good_processes(world(), quick(), [&](const ProcessGroup& group) {
    std::vector<int> backwards;
    for (int r = world() - 1; r >= 0; --r) backwards.push_back(r);
    Rpc rpc = init_rpc(*group.subgroup(backwards), quick_rpc());
    EXPECT_ERROR(share_tensors(group, {}), ErrorCode::invalid_argument,
                 "rank 0: rank 0 in the world of process groups is RPC rank " + std::to_string(world() - 1) +
                     ", expected the same");
    rpc.shutdown();
  });
}

TEST_P(RpcTest, TensorsThatAreNotOnCpuAreRefusedAndNothingLeaks) {
  expect_good_processes(world(), quick(), [&](const ProcessGroup& group) {
    Rpc rpc = init_rpc(group, quick_rpc());
    std::vector<at::Tensor> mine = {at::ones({2})};
    const c10::weak_intrusive_ptr<c10::TensorImpl> alive(mine[0].getIntrusivePtr());
    if (group.rank() == world() - 1) mine.push_back(at::empty({2}, at::kMeta));
    EXPECT_ERROR(share_tensors(group, mine), ErrorCode::unsupported, "a tensor is on meta, expected CPU");
    mine.clear();
    EXPECT_TRUE(alive.expired());
    rpc.shutdown();
  });
}

class RpcFailureTest : public RpcTest {};
INSTANTIATE_TEST_SUITE_P(Worlds, RpcFailureTest, ::testing::Values(2, 3, 4));

// Rank 1 dies. A fetch from it reports so, the others still answer, and no rank hangs when RPC ends.
TEST_P(RpcFailureTest, AnOwnerThatDiedIsNamed) {
  const auto begin = std::chrono::steady_clock::now();
  const testing::TemporaryDirectory directory;
  const std::vector<RankOutcome> outcomes = run_processes(world(), quick(), [&](const ProcessGroup& group) {
    Rpc rpc = init_rpc(group, quick_rpc());
    const std::vector<at::Tensor> mine = {at::full({4}, group.rank())};
    const auto shared = share_tensors(group, mine);
    if (group.rank() == 0) {
      EXPECT_TRUE(at::equal(shared[1].at(0).fetch(), at::full({4}, 1)));
      EXPECT_TRUE(at::equal(shared[1].at(0).fetch(milliseconds::max()), at::full({4}, 1)));
      EXPECT_ERROR(shared[1].at(0).fetch(milliseconds(0)), ErrorCode::invalid_argument,
                   "fetch a tensor of rank 1: timeout 0 ms, expected more than 0");
    }
    group.barrier();
    if (group.rank() == 1) ::kill(::getpid(), SIGKILL);
    EXPECT_ERROR(group.barrier(), ErrorCode::rank_failure, "rank 1 died");
    EXPECT_ERROR(shared[1].at(0).fetch(), ErrorCode::rank_failure, "fetch a tensor of rank 1: it did not answer");
    if (group.rank() == 0) {
      if (world() > 2) {
        EXPECT_TRUE(at::equal(shared[2].at(0).fetch(), at::full({4}, 2)));
      }
      std::ofstream(directory / "fetched").put('1');
    }
    EXPECT_TRUE(soon([&] { return std::filesystem::exists(directory / "fetched"); }));  // before rank 2 leaves
    EXPECT_ERROR(rpc.shutdown(), ErrorCode::rank_failure, "barrier on rank", "rank 1 died");
    EXPECT_FALSE(is_rpc_initialized());
    return std::string(::testing::Test::HasFailure() ? "failed" : "good");
  });
  for (std::size_t rank = 0; rank < outcomes.size(); ++rank) {
    if (rank == 1) continue;
    EXPECT_EQ(outcomes[rank].report, "good") << "rank " << rank;
  }
  EXPECT_EQ(outcomes[1].signal, SIGKILL);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, kSoon);
}

// Returns whether all threads of a process are stopped, which some are after others.
bool is_stopped(pid_t pid) {
  for (const auto& thread : std::filesystem::directory_iterator(fmt::format("/proc/{}/task", pid))) {
    std::ifstream stat(thread.path() / "stat");
    std::string line;
    std::getline(stat, line);
    if (line.compare(line.rfind(')') + 1, 2, " T") != 0) return false;
  }
  return true;
}

TEST_P(RpcFailureTest, AnOwnerThatDoesNotAnswerIsNotWaitedForLongerThanTheTimeout) {
  const std::vector<RankOutcome> outcomes = run_processes(world(), quick(), [&](const ProcessGroup& group) {
    RpcOptions options = quick_rpc();
    options.timeout = seconds(3);  // a rank with RPC takes a processor all the time: TensorPipe polls shared memory
    Rpc rpc = init_rpc(group, options);
    const std::vector<at::Tensor> mine = {at::full({4}, group.rank())};
    const auto shared = share_tensors(group, mine);
    const pid_t pid = ::getpid();
    const Bytes stopped = group.broadcast_bytes({reinterpret_cast<const std::uint8_t*>(&pid), sizeof(pid)}, 1);
    pid_t other = 0;
    std::memcpy(&other, stopped.data(), sizeof(other));
    if (group.rank() == 1) ::kill(pid, SIGSTOP);
    if (group.rank() == 0) {
      EXPECT_TRUE(soon([&] { return is_stopped(other); }));
      const auto begin = std::chrono::steady_clock::now();
      EXPECT_ERROR(shared[1].at(0).fetch(milliseconds(300)), ErrorCode::rank_failure, "tensor of rank 1", "(300 ms)");
      EXPECT_LT(std::chrono::steady_clock::now() - begin, milliseconds(2700));
      EXPECT_ERROR(shared[1].at(0).fetch(), ErrorCode::rank_failure, "fetch a tensor of rank 1", "(3000 ms)");
      EXPECT_LT(std::chrono::steady_clock::now() - begin, kSoon);
    }
    EXPECT_ERROR(rpc.shutdown(), ErrorCode::rank_failure, "rank 1 died");
    if (group.rank() == 0) ::kill(other, SIGKILL);
    return std::string(::testing::Test::HasFailure() ? "failed" : "good");
  });
  EXPECT_EQ(outcomes[0].report, "good");
}

TEST_P(RpcFailureTest, ARankThatLeavesWithoutShutdownIsNamed) {
  const std::vector<RankOutcome> outcomes = run_processes(world(), quick(), [&](const ProcessGroup& group) {
    Rpc rpc = init_rpc(group, quick_rpc());
    const std::vector<at::Tensor> mine = {at::full({4}, group.rank())};
    const auto shared = share_tensors(group, mine);
    group.barrier();
    if (group.rank() == 1) throw std::runtime_error("no more");
    EXPECT_TRUE(soon([&] {
      try {
        shared[1].at(0).fetch();
        return false;
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::rank_failure);
        return true;
      }
    }));
    EXPECT_ERROR(rpc.shutdown(), ErrorCode::rank_failure, "rank 1 left the group");
    return std::string(::testing::Test::HasFailure() ? "failed" : "good");
  });
  EXPECT_EQ(outcomes[0].report, "good");
  EXPECT_EQ(outcomes[1].report, "exception: no more");
}

TEST_P(RpcFailureTest, ARankThatDiesBeforeItComesIsNamed) {
  const std::vector<RankOutcome> outcomes = run_processes(world(), quick(), [&](const ProcessGroup& group) {
    group.barrier();
    if (group.rank() == 1) ::kill(::getpid(), SIGKILL);
    EXPECT_ERROR(init_rpc(group, quick_rpc()), ErrorCode::rank_failure, "rank 1 died");
    EXPECT_FALSE(is_rpc_initialized());
    return std::string(::testing::Test::HasFailure() ? "failed" : "good");
  });
  EXPECT_EQ(outcomes[0].report, "good");
}

// Exits with statics destroyed, as a program does.
TEST_P(RpcFailureTest, AProgramExitsCleanlyWithAndWithoutShutdown) {
  for (const bool shuts_down : {true, false}) {
    const auto begin = std::chrono::steady_clock::now();
    const std::vector<RankOutcome> outcomes =
        run_processes(world(), quick(), [&](const ProcessGroup& group) -> std::string {
          static std::vector<std::vector<RemoteTensor>> shared;  // outlives RPC
          {
            Rpc rpc = init_rpc(group, quick_rpc());
            const std::vector<at::Tensor> mine = {at::full({4}, group.rank())};
            shared = share_tensors(group, mine);
            group.barrier();
            if (shuts_down) rpc.shutdown();
          }
          std::exit(0);
        });
    for (const RankOutcome& outcome : outcomes) EXPECT_EQ(outcome.report, "");
    EXPECT_LT(std::chrono::steady_clock::now() - begin, kSoon);
  }
}

}  // namespace
}  // namespace tessera
