// Shared memory without a name, and connections that pass its descriptor.

#include "comm/host/descriptor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "support/child_process.h"
#include "support/rank_processes.h"
#include "tessera/comm/internal/shared_memory.h"

namespace tessera {
namespace {

using comm::Descriptor;

struct ConnectedSockets {
  ConnectedSockets() {
    int ends[2];
    if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) throw std::runtime_error("no socketpair");
    first = Descriptor(ends[0]);
    second = Descriptor(ends[1]);
  }
  Descriptor first, second;
};

void do_nothing(int /*signal*/) {}

// Some kernels give up an allocation for a signal.
TEST(DescriptorTest, SignalsDoNotKeepMemoryFromBeingAllocated) {
  struct sigaction action {};
  action.sa_handler = do_nothing;
  ASSERT_EQ(::sigaction(SIGALRM, &action, nullptr), 0);
  const itimerval often{{0, 500}, {0, 500}}, never{};
  ASSERT_EQ(::setitimer(ITIMER_REAL, &often, nullptr), 0);
  EXPECT_NO_THROW(comm::make_shared_memory(std::size_t{64} << 20));
  ::setitimer(ITIMER_REAL, &never, nullptr);
}

TEST(DescriptorTest, AConnectionDoesNotWaitToBeAccepted) {
  const std::string name = "tessera-test-" + std::to_string(::getpid());
  const Descriptor listening = comm::listen_at(name);
  ASSERT_EQ(::listen(listening.number(), 0), 0);
  std::vector<Descriptor> connected;
  try {
    for (int i = 0; i < 8; ++i) connected.push_back(comm::connect_to(name));
    FAIL() << "no error";
  } catch (const std::system_error& error) {
    EXPECT_EQ(error.code().value(), EAGAIN);
  }
}

TEST(DescriptorTest, WhatCannotBeSentIsNotWaitedFor) {
  const ConnectedSockets connection;
  EXPECT_THROW(comm::send_descriptor(connection.first, Descriptor()), std::system_error);
  EXPECT_THROW(comm::receive_descriptor(connection.second, {testing::kLongTimeout, [] {}}), std::runtime_error);
}

TEST(DescriptorTest, AWaitEndsWhenItsCheckThrows) {
  const ConnectedSockets connection;
  const auto check = [] { throw std::logic_error("rank 1 died"); };
  EXPECT_THROW(comm::receive_descriptor(connection.second, {testing::kLongTimeout, check}), std::logic_error);
}

// Accepts the connections of strangers, who connect all the time, until a wait throws.
void accept_strangers(const comm::Patience& patience) {
  const std::string name = "tessera-test-" + std::to_string(::getpid());
  std::vector<Descriptor> listening;
  listening.push_back(comm::listen_at(name));
  std::atomic<bool> is_over = false;
  std::thread strangers([&] {
    while (!is_over) {
      try {
        comm::connect_to(name);
      } catch (const std::system_error&) {  // too many are waiting
        std::this_thread::yield();
      }
    }
  });
  try {
    for (;;) {
      comm::wait_readable(listening, patience);
      comm::accept_from(listening[0]);
    }
  } catch (...) {
    is_over = true;
    strangers.join();
    throw;
  }
}

TEST(DescriptorTest, StrangersDoNotProlongAWait) {
  EXPECT_THROW(accept_strangers({std::chrono::milliseconds(100), [] {}}), std::runtime_error);
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_THROW(accept_strangers({testing::kLongTimeout,
                                 [&] {
                                   if (std::chrono::steady_clock::now() - begin > std::chrono::milliseconds(100))
                                     throw std::logic_error("rank 1 died");
                                 }}),
               std::logic_error);
}

TEST(DescriptorTest, ADescriptorArrives) {
  const ConnectedSockets connection;
  comm::send_descriptor(connection.first, comm::make_shared_memory(comm::page_bytes()));
  const Descriptor memory = comm::receive_descriptor(connection.second, {testing::kLongTimeout, [] {}});
  EXPECT_EQ(::lseek(memory.number(), 0, SEEK_END), static_cast<off_t>(comm::page_bytes()));
}

// Strangers may connect.
TEST(DescriptorTest, BytesOfAnotherSizeAreNotReceived) {
  const ConnectedSockets connection;
  std::uint64_t received = 0;
  EXPECT_FALSE(comm::receive_bytes(connection.second, &received, sizeof(received)));
  comm::send_bytes(connection.first, "abc", 3);
  EXPECT_FALSE(comm::receive_bytes(connection.second, &received, sizeof(received)));
  comm::send_bytes(connection.first, "abcdefgh", 8);
  EXPECT_TRUE(comm::receive_bytes(connection.second, &received, sizeof(received)));
  ::shutdown(connection.first.number(), SHUT_RDWR);
  EXPECT_FALSE(comm::receive_bytes(connection.second, &received, sizeof(received)));
}

TEST(DescriptorTest, AViewInAChildDropsItsOwnWrites) {
  const std::size_t size_bytes = 4 * comm::page_bytes();
  const Descriptor memory = comm::make_shared_memory(size_bytes);
  const auto drop_write = [&] {
    comm::SharedMemoryView view(memory, size_bytes);
    auto* const data = static_cast<volatile std::uint8_t*>(view.data());
    data[0] = 1;
    view.drop_writes();
    if (data[0] != 0) throw std::runtime_error("the write remains");
  };
  EXPECT_NO_THROW(drop_write());
  EXPECT_EQ(testing::wait_for_child(testing::start_child(drop_write)), 0);
}

}  // namespace
}  // namespace tessera
