#include "tessera/base/thread_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <stdexcept>
#include <thread>

namespace tessera {
namespace {

TEST(ThreadPoolTest, EveryTaskRunsOnce) {
  ThreadPool pool(3);
  std::atomic<int> sum = 0;
  for (int i = 1; i <= 1000; ++i) pool.submit([&sum, i] { sum += i; });
  pool.wait();
  EXPECT_EQ(sum, 500500);
}

TEST(ThreadPoolTest, SubmitBlocksWhileTheQueueIsFull) {
  std::atomic<bool> release = false;
  std::atomic<int> begun = 0;
  ThreadPool pool(1, 2);
  const auto task = [&] {
    ++begun;
    while (!release) std::this_thread::yield();
  };
  pool.submit(task);
  while (begun == 0) std::this_thread::yield();
  pool.submit(task);
  pool.submit(task);  // the queue is now full
  std::atomic<bool> submitted = false;
  std::thread other([&] {
    pool.submit([] {});
    submitted = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  EXPECT_FALSE(submitted);
  release = true;
  other.join();
  pool.wait();
}

TEST(ThreadPoolTest, TheFirstFailureStopsWhatHasNotBegun) {
  std::atomic<bool> release = false;
  std::atomic<int> ran = 0;
  ThreadPool pool(1, 10);
  pool.submit([&] {
    while (!release) std::this_thread::yield();
    throw std::runtime_error("first");
  });
  for (int i = 0; i < 5; ++i) pool.submit([&] { ++ran; });
  release = true;
  EXPECT_THROW(pool.wait(), std::runtime_error);
  EXPECT_EQ(ran, 0);
  EXPECT_THROW(pool.submit([] {}), std::runtime_error);
}

TEST(ThreadPoolTest, DestructionDropsWhatHasNotBegun) {
  std::atomic<int> ran = 0;
  {
    ThreadPool pool(1, 100);
    for (int i = 0; i < 100; ++i) {
      pool.submit([&] {
        ++ran;
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      });
    }
  }
  EXPECT_LT(ran, 100);
}

TEST(ThreadPoolTest, ThereIsAtLeastOneProcessor) { EXPECT_GE(available_processors(), 1u); }

}  // namespace
}  // namespace tessera
