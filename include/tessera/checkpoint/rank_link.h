#pragma once
/// \file
/// The collectives that saving and loading need, independent of how ranks communicate.
///
/// Every function except `rank`, `size`, `coordinator` and `is_coordinator` is a collective: all ranks call it, in the
/// same order. The coordinator is the rank that makes the global plan of a save and writes `.metadata`, and that reads
/// it for all ranks when loading. If a rank fails or dies, every other rank throws `Error(rank_failure)` naming it,
/// within the implementation's timeout.

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
  /// Returns the same on all ranks.
  virtual int coordinator() const { return 0; }
  /// Returns on the coordinator the bytes that each rank passed, by rank; returns an empty list on other ranks.
  virtual std::vector<Bytes> gather(ByteView bytes) = 0;
  /// Sends parts[r] of the coordinator to rank r and returns this rank's part. `parts` of other ranks are ignored.
  virtual Bytes scatter(const std::vector<Bytes>& parts) = 0;
  /// Returns the bytes that the coordinator passed. `bytes` of other ranks are ignored.
  virtual Bytes broadcast(ByteView bytes) = 0;
  /// Sends parts[r] to rank r. Returns the received parts by sending rank.
  virtual std::vector<Bytes> all_to_all(const std::vector<Bytes>& parts) = 0;
  /// Agrees on the outcome of `step`: each rank passes its failure, or null. If any rank failed, every rank throws an
  /// `Error` that states the step, the failed ranks and the reasons. Its code is that of the failures if they share
  /// one, else rank_failure.
  virtual void agree(std::string_view step, const std::exception_ptr& failure) = 0;

  bool is_coordinator() const { return rank() == coordinator(); }
  /// Runs `f`, agrees on its outcome, and returns its result. If `f` throws on any rank, every rank throws.
  template <typename F>
  auto agree_on(std::string_view step, F&& f);
};

/// Returns the link of a single process, with one rank.
RankLink& alone();

template <typename F>
auto RankLink::agree_on(std::string_view step, F&& f) {
  return agree_on_outcome(std::forward<F>(f), [&](const std::exception_ptr& failure) { agree(step, failure); });
}

}  // namespace tessera::checkpoint
