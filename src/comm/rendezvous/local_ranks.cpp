#include "tessera/comm/local_ranks.h"

#include <mutex>
#include <thread>
#include <vector>

#include "comm/exceptions.h"
#include "comm/rendezvous/store.h"
#include "comm/rendezvous/world.h"

namespace tessera {

void run_local(int ranks, const std::function<void(const ProcessGroup& group)>& f, const LocalOptions& options) {
  if (ranks < 1) fail(ErrorCode::invalid_argument, "run {} local ranks: expected at least 1", ranks);
  if (ranks == 1) return f(ProcessGroup());

  const comm::StorePtr store = comm::make_local_store();
  std::mutex mutex;
  std::exception_ptr first;
  const auto run = [&](int rank) {
    const auto liveness =
        std::make_shared<comm::Liveness>(comm::with_prefix("live", store), false, rank, ranks, std::nullopt);
    try {
      f(comm::make_world({options.backend, rank, ranks, options.timeout, comm::with_prefix("world", store), liveness}));
    } catch (...) {
      const std::lock_guard lock(mutex);
      if (!first) first = std::current_exception();
      liveness->report(fmt::format("rank {} failed: {}", rank, comm::message_of(std::current_exception())));
    }
  };
  std::vector<std::thread> threads;
  threads.reserve(static_cast<std::size_t>(ranks));
  for (int rank = 0; rank < ranks; ++rank) threads.emplace_back(run, rank);
  for (std::thread& thread : threads) thread.join();
  if (first) std::rethrow_exception(first);
}

}  // namespace tessera
