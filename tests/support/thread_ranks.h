#pragma once
// Ranks as threads, without LibTorch, linked for checkpoints.

#include <condition_variable>
#include <exception>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tessera/base/function_ref.h"
#include "tessera/base/rank_errors.h"
#include "tessera/checkpoint/rank_link.h"

namespace tessera::testing {

// Exchanges the parts of all ranks. If a rank leaves, ranks that wait throw an error naming it.
class ThreadRanks {
 public:
  explicit ThreadRanks(int size) : size_(size), slots_(static_cast<std::size_t>(size)) {}

  std::vector<Bytes> exchange(int rank, ByteView bytes) {
    std::unique_lock lock(mutex_);
    slots_[static_cast<std::size_t>(rank)].assign(bytes.begin(), bytes.end());
    const std::uint64_t round = round_;
    if (++arrived_ == size_) {
      result_ = slots_;
      arrived_ = 0;
      ++round_;
      changed_.notify_all();
    } else {
      changed_.wait(lock, [&] { return round_ != round || dead_; });
      if (round_ == round) fail(ErrorCode::rank_failure, "rank {} died", *dead_);
    }
    ++collectives_;
    return result_;
  }
  void leave(int rank) {
    const std::lock_guard lock(mutex_);
    if (!dead_) dead_ = rank;
    changed_.notify_all();
  }
  int size() const { return size_; }
  // Over all ranks.
  std::uint64_t collectives() const { return collectives_; }

 private:
  int size_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Bytes> slots_, result_;
  int arrived_ = 0;
  std::uint64_t round_ = 0, collectives_ = 0;
  std::optional<int> dead_;
};

class ThreadLink final : public checkpoint::RankLink {
 public:
  ThreadLink(ThreadRanks& ranks, int rank) : ranks_(ranks), rank_(rank) {}
  int rank() const override { return rank_; }
  int size() const override { return ranks_.size(); }
  std::vector<Bytes> gather(ByteView bytes) override {
    sent_bytes += bytes.size();
    std::vector<Bytes> all = ranks_.exchange(rank_, bytes);
    if (rank_ != 0) all.clear();
    return all;
  }
  Bytes scatter(const std::vector<Bytes>& parts) override {
    return part_of(ranks_.exchange(rank_, rank_ == 0 ? pack(parts) : Bytes())[0]);
  }
  Bytes broadcast(ByteView bytes) override { return ranks_.exchange(rank_, rank_ == 0 ? bytes : ByteView())[0]; }
  std::vector<Bytes> all_to_all(const std::vector<Bytes>& parts) override {
    std::vector<Bytes> all = ranks_.exchange(rank_, pack(parts));
    for (Bytes& one : all) one = part_of(one);
    return all;
  }
  void agree(std::string_view step, const std::exception_ptr& failure) override {
    Bytes mine;
    if (failure) {
      try {
        std::rethrow_exception(failure);
      } catch (const Error& error) {
        mine.push_back(static_cast<std::uint8_t>(error.code()));
        append(mine, error.what());
      }
    }
    std::vector<RankFailure> failures;
    const std::vector<Bytes> all = ranks_.exchange(rank_, mine);
    for (std::size_t r = 0; r < all.size(); ++r) {
      if (all[r].empty()) continue;
      failures.push_back(
          {static_cast<int>(r), static_cast<ErrorCode>(all[r][0]), std::string(as_text(ByteView(all[r]).subspan(1)))});
    }
    if (!failures.empty()) fail_for_ranks(step, failures, size());
  }

  std::uint64_t sent_bytes = 0;  // in gathers

 private:
  static Bytes pack(const std::vector<Bytes>& parts) {
    Bytes packed;
    for (const Bytes& part : parts) {
      append_little_endian<std::uint64_t>(packed, part.size());
      append(packed, part);
    }
    return packed;
  }
  // Returns this rank's part.
  Bytes part_of(const Bytes& packed) const {
    std::size_t at = 0;
    for (int r = 0;; ++r) {
      const auto size = load_little_endian<std::uint64_t>(packed.data() + at);
      at += 8;
      const auto begin = packed.begin() + static_cast<std::ptrdiff_t>(at);
      if (r == rank_) return {begin, begin + static_cast<std::ptrdiff_t>(size)};
      at += size;
    }
  }

  ThreadRanks& ranks_;
  int rank_;
};

// Runs f on `size` ranks. Returns the exception of each as "code: message", or "" if it returned.
inline std::vector<std::string> run_thread_ranks(int size, FunctionRef<void(ThreadLink& link)> f) {
  ThreadRanks ranks(size);
  std::vector<std::string> reports(static_cast<std::size_t>(size));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      ThreadLink link(ranks, rank);
      try {
        f(link);
      } catch (const Error& error) {
        reports[static_cast<std::size_t>(rank)] = std::string(error_code_name(error.code())) + ": " + error.what();
        ranks.leave(rank);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return reports;
}

}  // namespace tessera::testing
