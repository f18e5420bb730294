#pragma once
/// \file
/// How a checkpoint reaches the other ranks: all that saving and loading need of a process group.
///
/// Every function is a collective: all ranks call it, in the same order. Rank 0 coordinates. A rank that fails or dies
/// is `Error(rank_failure)` on all others, naming it, within the implementation's timeout.

#include <exception>
#include <string_view>
#include <utility>
#include <vector>

#include "tessera/base/bytes.h"
#include "tessera/base/rank_errors.h"

namespace tessera::checkpoint {

class RankLink {
 public:
  RankLink() = default;
  RankLink(const RankLink&) = delete;
  RankLink& operator=(const RankLink&) = delete;
  virtual ~RankLink() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  /// What each rank brings, by rank, on rank 0; nothing elsewhere.
  virtual std::vector<Bytes> gather(ByteView bytes) = 0;
  /// Part r of rank 0's goes to rank r; what others bring is not looked at.
  virtual Bytes scatter(const std::vector<Bytes>& parts) = 0;
  /// Rank 0's; what others bring is not looked at.
  virtual Bytes broadcast(ByteView bytes) = 0;
  /// Part r of each rank's goes to rank r; what came, by the rank that it came from.
  virtual std::vector<Bytes> all_to_all(const std::vector<Bytes>& parts) = 0;
  /// Each rank brings its failure in `step`, or null. If any does, every rank throws an `Error` that says the step, the
  /// ranks that failed and why: with their code if they have one in common, else rank_failure.
  virtual void agree(std::string_view step, const std::exception_ptr& failure) = 0;

  bool is_coordinator() const { return rank() == 0; }
  /// Runs `f` and agrees on how it ended; returns what it returned.
  template <typename F>
  auto agree_on(std::string_view step, F&& f);
};

/// This process alone.
RankLink& alone();

template <typename F>
auto RankLink::agree_on(std::string_view step, F&& f) {
  return agree_on_outcome(std::forward<F>(f), [&](const std::exception_ptr& failure) { agree(step, failure); });
}

}  // namespace tessera::checkpoint
