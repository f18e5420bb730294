#include "tessera/base/thread_pool.h"

#include <gtest/gtest.h>
#include <pthread.h>
#include <sys/resource.h>

#include <atomic>
#include <chrono>
#include <stdexcept>
#include <thread>

#include "tessera/base/error.h"
#include "tessera/base/internal/process_memory.h"

namespace tessera {
namespace {

TEST(ThreadPoolTest, EveryTaskRunsOnce) {
  ThreadPool pool(3);
  std::atomic<int> sum = 0;
  for (int i = 1; i <= 1000; ++i) pool.submit([&sum, i] { sum += i; });
  pool.wait();
  EXPECT_EQ(sum, 500500);
}

void set_stack_size(std::size_t bytes) {
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  ASSERT_EQ(pthread_attr_setstacksize(&attributes, bytes), 0);
  ASSERT_EQ(pthread_setattr_default_np(&attributes), 0);
  pthread_attr_destroy(&attributes);
}

// There is memory for the stacks of 9 threads at most.
TEST(ThreadPoolTest, ThreadsThatCannotStartAreLeftOut) {
  constexpr std::size_t kStackUnit = std::size_t{1} << 20;
  set_stack_size(64 * kStackUnit);
  rlimit limit{};
  limit.rlim_cur = limit.rlim_max = status_bytes("VmData") + 600 * kStackUnit;
  ASSERT_EQ(::setrlimit(RLIMIT_DATA, &limit), 0);
  ThreadPool pool(20);
  EXPECT_GE(pool.threads(), 1u);
  EXPECT_LT(pool.threads(), 10u);
  std::atomic<int> sum = 0;
  for (int i = 0; i < 100; ++i) pool.submit([&sum] { ++sum; });
  pool.wait();
  EXPECT_EQ(sum, 100);
}

TEST(ThreadPoolTest, APoolWithoutAnyThreadIsAnError) {
  set_stack_size(std::size_t{1} << 47);
  try {
    const ThreadPool pool(2);
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::io);
    EXPECT_EQ(std::string(error.what()).find("start a thread: the system refused ("), 0u) << error.what();
  }
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

TEST(ThreadPoolTest, ThreadsForFilesAreAsAskedOrFourToSixteen) {
  EXPECT_EQ(threads_for(1), 1u);
  EXPECT_EQ(threads_for(100), 100u);
  EXPECT_GE(threads_for(0), 4u);
  EXPECT_LE(threads_for(0), 16u);
}

}  // namespace
}  // namespace tessera
