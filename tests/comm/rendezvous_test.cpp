// Ranks that cannot find each other are told so in time: no call to the store waits without a limit.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "comm/rendezvous/deadline_store.h"
#include "support/error_matchers.h"
#include "support/rank_processes.h"

namespace tessera {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

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

TEST(RendezvousTest, AServerThatIsSilentIsNoStore) {
  const int listener = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  ASSERT_EQ(::bind(listener, reinterpret_cast<sockaddr*>(&address), size), 0);
  ASSERT_EQ(::listen(listener, 8), 0);
  ::getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size);
  InitOptions options = second_of_two();
  options.master_port = ntohs(address.sin_port);
  const Stopwatch watch;
  EXPECT_ERROR(init_process_group(options), ErrorCode::rank_failure,
               "rank 1 could not reach rank 0's store at 127.0.0.1", "no answer within");
  EXPECT_LT(watch.elapsed(), seconds(6));
  // The listener stays open until the process ends: when it closes, a thread of LibTorch 1.13's client, which still has
  // the connection, throws.
}

TEST(RendezvousTest, AHostWithoutAnAddressIsNamed) {
  InitOptions options = second_of_two();
  options.master_addr = "no-such-host.invalid";
  const Stopwatch watch;
  EXPECT_ERROR(init_process_group(options), ErrorCode::rank_failure, "no-such-host.invalid:29500", "within 2000 ms");
  EXPECT_LT(watch.elapsed(), seconds(6));
}

TEST(RendezvousTest, AMasterThatDoesNotRunIsNamed) {
  InitOptions options = second_of_two();
  options.master_port = testing::free_port();
  const Stopwatch watch;
  EXPECT_ERROR(init_process_group(options), ErrorCode::rank_failure, "could not reach rank 0's store", "2000 ms");
  EXPECT_LT(watch.elapsed(), seconds(6));
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
  EXPECT_THROW(worker.run(seconds(10), [&] { ++calls; }), std::runtime_error);
  EXPECT_LT(watch.elapsed(), seconds(5));
  EXPECT_EQ(calls, 1);
  const std::lock_guard lock(gate->mutex);
  gate->is_open = true;
  gate->changed.notify_all();
}

}  // namespace
}  // namespace tessera
