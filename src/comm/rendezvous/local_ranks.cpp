#include "tessera/comm/local_ranks.h"

#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "comm/exceptions.h"
#include "comm/rendezvous/store.h"
#include "comm/rendezvous/world.h"
#include "tessera/base/function_ref.h"
#include "tessera/base/internal/timeout.h"

namespace tessera {

namespace {

// Runs a step that starts a thread.
void start_thread(int ranks, FunctionRef<void()> start) {
  try {
    start();
  } catch (const std::system_error& error) {
    fail(ErrorCode::io, "run {} local ranks: the system refused ({}), expected threads for each rank", ranks,
         error.what());
  }
}

}  // namespace

void run_local(int ranks, FunctionRef<void(const ProcessGroup& group)> f, const LocalOptions& options) {
  if (ranks < 1) fail(ErrorCode::invalid_argument, "run {} local ranks: expected at least 1", ranks);
  if (options.timeout.count() <= 0) {
    fail(ErrorCode::invalid_argument, "run {} local ranks: timeout {} ms, expected more than 0", ranks,
         options.timeout.count());
  }
  if (ranks == 1) return f(ProcessGroup());

  const std::chrono::milliseconds timeout = bounded(options.timeout);
  const comm::StorePtr store = comm::make_local_store(), live = comm::with_prefix("live", store);
  std::mutex mutex;
  std::exception_ptr first;
  const auto fail_all = [&](int rank, const std::exception_ptr& failure) {
    const std::lock_guard lock(mutex);
    if (!first) first = failure;
    comm::Liveness::report(*live, fmt::format("rank {} failed: {}", rank, comm::message_of(failure)));
  };
  const auto run = [&](int rank) {
    std::shared_ptr<comm::Liveness> liveness;  // until after the report: this rank leaves after it
    try {
      start_thread(ranks, [&] {
        liveness = std::make_shared<comm::Liveness>(comm::with_prefix("live", store), false, rank, ranks, std::nullopt);
      });
      f(comm::make_world({options.backend, rank, ranks, timeout, comm::with_prefix("world", store), liveness}));
    } catch (...) {
      fail_all(rank, std::current_exception());
    }
  };
  std::vector<std::thread> threads;
  threads.reserve(static_cast<std::size_t>(ranks));
  try {
    for (int rank = 0; rank < ranks; ++rank) start_thread(ranks, [&] { threads.emplace_back(run, rank); });
  } catch (...) {
    fail_all(static_cast<int>(threads.size()), std::current_exception());
  }
  for (std::thread& thread : threads) thread.join();
  if (first) std::rethrow_exception(first);
}

}  // namespace tessera
