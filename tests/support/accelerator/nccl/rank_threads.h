#pragma once
// Ranks as threads, each with a device of its own: rank r has sim:r.

#include <c10/core/DeviceGuard.h>

#include <exception>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "support/accelerator/accelerator.h"
#include "support/accelerator/nccl/backend.h"
#include "tessera/base/function_ref.h"

namespace tessera::sim {

// Runs `f` in a thread for each rank, whose current device is the rank's, and returns when all have returned. Rethrows
// the first exception. A rank that waits for one that threw gets an error after 60 seconds.
inline void run_rank_threads(int ranks, FunctionRef<void(int rank)> f) {
  install();
  std::mutex mutex;
  std::exception_ptr failure;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        const c10::DeviceGuard guard(device(rank));
        f(rank);
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (failure == nullptr) failure = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  if (failure != nullptr) std::rethrow_exception(failure);
}

// The same with a backend that connects the ranks.
inline void run_nccl_ranks(int ranks, FunctionRef<void(NcclBackend& backend)> f) {
  const std::string name = Group::new_name();
  run_rank_threads(ranks, [&](int rank) {
    const auto backend = c10::make_intrusive<NcclBackend>(name, rank, ranks);
    f(*backend);
  });
}

}  // namespace tessera::sim
