#pragma once
// The size of an exchange of elements between ranks, by which all of them choose how to exchange.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>

#include "tessera/layout/box.h"

namespace tessera {

// In elements, the same on all ranks.
struct ExchangeSize {
  std::int64_t sent = 0;             // by all ranks, to others
  std::int64_t largest_message = 0;  // no rank sends more to another
  // A contiguous run of a move in the source's or the destination's local tensor, whichever has shorter runs: a mean.
  std::int64_t run_length = 0;
  bool operator==(const ExchangeSize&) const = default;
};

// Adds up the moves of all ranks.
class ExchangeSizeSum {
 public:
  // Adds the move of `box`, which is a part of the source's shard and of the destination's.
  void add(std::int64_t source, std::int64_t destination, BoxView box, BoxView source_shard,
           BoxView destination_shard) {
    if (source == destination) return;
    messages_[{source, destination}] += volume(box);
    source_runs_ += count_runs(box, source_shard);
    destination_runs_ += count_runs(box, destination_shard);
  }
  ExchangeSize total() const {
    ExchangeSize size;
    for (const auto& [ranks, elements] : messages_) {
      size.sent += elements;
      size.largest_message = std::max(size.largest_message, elements);
    }
    const std::int64_t runs = std::max(source_runs_, destination_runs_);
    if (runs > 0) size.run_length = size.sent / runs;
    return size;
  }

 private:
  // Returns the number of contiguous runs of `box` in the row-major `shard`.
  static std::int64_t count_runs(BoxView box, BoxView shard) {
    std::int64_t run = 1;
    for (std::size_t d = box.rank(); d-- > 0;) {
      run *= box.sizes[d];
      if (box.sizes[d] != shard.sizes[d]) break;
    }
    return volume(box) / run;
  }

  std::map<std::pair<std::int64_t, std::int64_t>, std::int64_t> messages_;
  std::int64_t source_runs_ = 0, destination_runs_ = 0;
};

}  // namespace tessera
