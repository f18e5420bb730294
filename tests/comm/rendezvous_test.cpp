// Ranks that cannot find each other are told so in time: no call to the store waits without a limit.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "comm/rendezvous/deadline_store.h"
#include "comm/rendezvous/liveness.h"
#include "comm/rendezvous/meeting.h"
#include "comm/rendezvous/store.h"
#include "support/error_matchers.h"
#include "support/rank_processes.h"

namespace tessera {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::kLongTimeout;
using testing::kSoon;

class Stopwatch {
 public:
  auto elapsed() const { return std::chrono::steady_clock::now() - begin_; }

 private:
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

InitOptions second_of_two() {
  InitOptions options;
  options.rank = 1;
  options.world_size = 2;
  options.timeout = seconds(2);
  options.liveness = seconds(1);
  return options;
}

// Accepts connections, never answers, and resets each connection after `patience`.
class MuteServer {
 public:
  explicit MuteServer(milliseconds patience) : patience_(patience), listener_(::socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(address);
    EXPECT_EQ(::bind(listener_, reinterpret_cast<sockaddr*>(&address), size), 0);
    EXPECT_EQ(::listen(listener_, 8), 0);
    ::getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &size);
    port_ = ntohs(address.sin_port);
    thread_ = std::thread([this] { serve(); });
  }
  MuteServer(const MuteServer&) = delete;
  MuteServer& operator=(const MuteServer&) = delete;
  ~MuteServer() {
    stops_ = true;
    thread_.join();
    ::close(listener_);
  }

  std::uint16_t port() const { return port_; }

 private:
  void serve() {
    struct Connection {
      int socket;
      Stopwatch age;
    };
    std::vector<Connection> connections;
    while (!stops_) {
      pollfd poll{listener_, POLLIN, 0};
      if (::poll(&poll, 1, 10) > 0) connections.push_back({::accept(listener_, nullptr, nullptr), {}});
      std::erase_if(connections, [&](const Connection& each) {
        if (each.age.elapsed() < patience_) return false;
        reset(each.socket);
        return true;
      });
    }
    for (const Connection& each : connections) reset(each.socket);
  }

  static void reset(int socket) {
    const linger at_once{1, 0};
    ::setsockopt(socket, SOL_SOCKET, SO_LINGER, &at_once, sizeof(at_once));
    ::close(socket);
  }

  milliseconds patience_;
  int listener_;
  std::uint16_t port_ = 0;
  std::atomic<bool> stops_ = false;
  std::thread thread_;
};

TEST(InitOptionsTest, WhatFitsNoRankIsRefused) {
  InitOptions options = second_of_two();
  options.world_size = 0;
  EXPECT_ERROR(init_process_group(options), ErrorCode::invalid_argument,
               "init process group: 0 ranks, expected at least 1");
  options.world_size = 1;
  EXPECT_ERROR(init_process_group(options), ErrorCode::invalid_argument,
               "init process group: rank 1 of 1, expected 0 to 0");
  options.world_size = 2;
  options.master_addr = "";
  const Stopwatch watch;
  EXPECT_ERROR(init_process_group(options), ErrorCode::invalid_argument,
               "init process group: master_addr is '', expected the address of rank 0's host");
  EXPECT_LT(watch.elapsed(), kSoon);
}

// Whatever the server does then, no thread may end the process.
TEST(RendezvousTest, AServerThatIsSilentIsNoStore) {
  for (const milliseconds patience : {milliseconds(200), milliseconds(kLongTimeout)}) {
    InitOptions options = second_of_two();
    {
      const MuteServer server(patience);
      options.master_port = server.port();
      const Stopwatch watch;
      EXPECT_ERROR(init_process_group(options), ErrorCode::rank_failure,
                   "rank 1 could not reach rank 0's store at 127.0.0.1", "answer");
      EXPECT_LT(watch.elapsed(), kSoon);
    }
    std::this_thread::sleep_for(milliseconds(200));
  }
}

TEST(RendezvousTest, AHostWithoutAnAddressIsNamed) {
  InitOptions options = second_of_two();
  options.master_addr = "no-such-host.invalid";
  const Stopwatch watch;
  EXPECT_ERROR(init_process_group(options), ErrorCode::rank_failure, "no-such-host.invalid:29500", "within 2000 ms");
  EXPECT_LT(watch.elapsed(), kSoon);
}

TEST(RendezvousTest, AMasterThatDoesNotRunIsNamed) {
  InitOptions options = second_of_two();
  options.master_port = free_port();
  const Stopwatch watch;
  EXPECT_ERROR(init_process_group(options), ErrorCode::rank_failure, "could not reach rank 0's store", "2000 ms");
  EXPECT_LT(watch.elapsed(), kSoon);
}

// A thread of the server reads messages as they come.
TEST(DeadlineStoreTest, IsFreedInTimeAfterHalfAMessage) {
  const std::uint16_t port = free_port();
  comm::StorePtr store = comm::connect_store({"127.0.0.1", port, 0, seconds(10), seconds(1)});
  const int client = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  ASSERT_EQ(::connect(client, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  ASSERT_EQ(::send(client, "", 1, 0), 1);
  std::this_thread::sleep_for(milliseconds(100));
  const Stopwatch watch;
  store.reset();
  EXPECT_LT(watch.elapsed(), kSoon);
  ::close(client);
}

TEST(LivenessTest, TheRankWithTheStoreDoesNotWaitForDeadRanks) {
  const comm::StorePtr store = comm::make_local_store();
  Stopwatch watch;
  {
    const comm::Liveness keeper(store, true, 0, 3, seconds(4));
    comm::put_text(*store, "sign/1", "1");  // the only sign of rank 1; rank 2 never starts
    EXPECT_TRUE(testing::soon([&] { return keeper.failure() == "rank 1 died: no sign of life for 4000 ms"; }));
    std::this_thread::sleep_for(milliseconds(300));
    watch = Stopwatch();
  }
  EXPECT_LT(watch.elapsed(), milliseconds(3700));
}

TEST(LivenessTest, TheRankWithTheStoreWaitsForLivingRanks) {
  const comm::StorePtr store = comm::make_local_store();
  std::thread other;
  const Stopwatch watch;
  {
    const comm::Liveness keeper(store, true, 0, 3, kLongTimeout);
    comm::put_text(*store, "sign/1", "left");
    other = std::thread([&] {
      const comm::Liveness rank_2(store, false, 2, 3, kLongTimeout);
      std::this_thread::sleep_for(milliseconds(500));
    });
    EXPECT_TRUE(testing::soon([&] { return store->check({"sign/2"}); }));
  }
  EXPECT_EQ(comm::get_text(*store, "sign/2"), "left");
  EXPECT_LT(watch.elapsed(), kSoon);
  other.join();
}

// Ranks as threads meet in `store`. Returns the name that each got.
std::vector<std::string> meet_all(const comm::StorePtr& store, int ranks) {
  std::vector<std::string> names(static_cast<std::size_t>(ranks));
  std::vector<std::thread> threads;
  for (int rank = ranks - 1; rank >= 0; --rank) {
    threads.emplace_back(
        [&, rank] { names[static_cast<std::size_t>(rank)] = comm::meet(*store, rank, ranks, seconds(20)); });
  }
  for (std::thread& thread : threads) thread.join();
  return names;
}

TEST(MeetingTest, RanksOfOneStartGetOneNameInAStoreThatHasKeysOfEarlierOnes) {
  const comm::StorePtr store = comm::make_local_store();
  std::vector<std::string> earlier;
  for (const int ranks : {3, 3, 2, 4}) {  // torchrun restarts with as many ranks as there are then
    const std::vector<std::string> names = meet_all(store, ranks);
    EXPECT_THAT(names, ::testing::Each(names[0]));
    EXPECT_THAT(earlier, ::testing::Not(::testing::Contains(names[0])));
    earlier.push_back(names[0]);
  }
}

TEST(MeetingTest, RanksThatDoNotJoinAreNamed) {
  const comm::StorePtr store = comm::make_local_store();
  meet_all(store, 3);  // whose keys do not count
  EXPECT_ERROR(comm::meet(*store, 0, 3, milliseconds(200)), ErrorCode::rank_failure,
               "ranks 1, 2 did not join within 200 ms, expected 3 ranks");
  EXPECT_ERROR(comm::meet(*store, 1, 3, milliseconds(200)), ErrorCode::rank_failure,
               "rank 0 did not answer rank 1 within 200 ms");
}

TEST(RendezvousTest, AnAgentThatDoesNotRunIsNamed) {
  InitOptions options = second_of_two();
  options.rank = 0;
  options.agent_store = true;
  options.master_port = free_port();
  EXPECT_ERROR(init_process_group(options), ErrorCode::rank_failure,
               "rank 0 could not use the store of torchrun's agent at 127.0.0.1", "LibTorch here is ");
}

TEST(DeadlineWorkerTest, AFunctionThatIsLateFailsItsCallAndAllLaterOnes) {
  struct Gate {
    std::mutex mutex;
    std::condition_variable changed;
    bool is_open = false;
  };
  const auto gate = std::make_shared<Gate>();
  comm::DeadlineWorker worker;
  int calls = 0;
  worker.run(seconds(10), [&] { ++calls; });
  EXPECT_THROW(worker.run(seconds(10), [] { throw std::logic_error("mine"); }), std::logic_error);
  const Stopwatch watch;
  EXPECT_THROW(worker.run(milliseconds(50),
                          [gate] {
                            std::unique_lock lock(gate->mutex);
                            gate->changed.wait(lock, [&] { return gate->is_open; });
                          }),
               std::runtime_error);
  EXPECT_THROW(worker.run(kLongTimeout, [&] { ++calls; }), std::runtime_error);
  EXPECT_LT(watch.elapsed(), kSoon);
  EXPECT_EQ(calls, 1);
  const std::lock_guard lock(gate->mutex);
  gate->is_open = true;
  gate->changed.notify_all();
}

}  // namespace
}  // namespace tessera
