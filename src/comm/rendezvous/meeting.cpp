#include "comm/rendezvous/meeting.h"

#include <fmt/ranges.h>

#include <map>
#include <random>
#include <thread>
#include <vector>

#include "comm/rendezvous/store.h"
#include "tessera/base/error.h"

namespace tessera::comm {

namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr milliseconds kPause(10);

std::string random_name() {
  std::random_device random;
  return fmt::format("{:08x}{:08x}", random(), random());
}

std::string call_key(int rank) { return fmt::format("call/{}", rank); }
std::string answer_key(int rank) { return fmt::format("answer/{}", rank); }
std::string ready_key(const std::string& start, int rank) { return fmt::format("{}/ready/{}", start, rank); }

// Answers the call of each rank with the name of the start, until the rank has read it. A call that is there at first
// may be of a rank that is gone; the call of the new one replaces it and gets an answer too.
std::string receive(::c10d::Store& store, int size, milliseconds timeout) {
  std::string start = random_name();
  const Clock::time_point deadline = Clock::now() + timeout;
  std::map<int, std::string> missing;  // the last call of each rank that has not read its answer
  for (int r = 1; r < size; ++r) missing[r];
  for (;;) {
    for (auto& [r, answered] : missing) {
      const std::string call = get_text(store, call_key(r));
      if (call == answered) continue;
      put_text(store, answer_key(r), fmt::format("{} {}", call, start));
      answered = call;
    }
    std::erase_if(missing, [&](const auto& each) { return !get_text(store, ready_key(start, each.first)).empty(); });
    if (missing.empty()) return start;
    if (Clock::now() >= deadline) {
      std::vector<int> ranks;
      ranks.reserve(missing.size());
      for (const auto& each : missing) ranks.push_back(each.first);
      fail(ErrorCode::rank_failure, "init process group: {} {} did not join within {} ms, expected {} ranks",
           ranks.size() == 1 ? "rank" : "ranks", fmt::join(ranks, ", "), timeout.count(), size);
    }
    std::this_thread::sleep_for(kPause);
  }
}

std::string join(::c10d::Store& store, int rank, milliseconds timeout) {
  const std::string call = random_name();
  const Clock::time_point deadline = Clock::now() + timeout;
  put_text(store, call_key(rank), call);
  for (;;) {
    const std::string answer = get_text(store, answer_key(rank));
    if (answer.starts_with(call + " ")) {
      std::string start = answer.substr(call.size() + 1);
      put_text(store, ready_key(start, rank), "yes");
      return start;
    }
    if (Clock::now() >= deadline) {
      fail(ErrorCode::rank_failure, "init process group: rank 0 did not answer rank {} within {} ms", rank,
           timeout.count());
    }
    std::this_thread::sleep_for(kPause);
  }
}

}  // namespace

std::string meet(::c10d::Store& store, int rank, int size, milliseconds timeout) {
  return rank == 0 ? receive(store, size, timeout) : join(store, rank, timeout);
}

}  // namespace tessera::comm
