#pragma once
// Moves elements between ranks as a plan says, from the shards that there are into new ones. Two ways to do it:
//
//   by collective    all-to-alls of bounded size. While one runs, the next one's elements are packed and the last one's
//                    unpacked, through staging buffers that stay in the cache. Any backend, any device.
//   by peer memory   each rank copies what it shall have out of the other ranks' shards. All ranks must be of one host
//                    and the tensor on CPU.
//
// All ranks must choose the same, with the same options.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "tensor/sharded/reshard_plan.h"
#include "tessera/comm/process_group.h"

namespace tessera {

struct ExchangeOptions {
  // At most so many bytes go from this rank to the others in one round of the exchange by collective, but at least one
  // element to each.
  std::int64_t round_bytes = std::int64_t{4} << 20;
  // Peers' memory is read where more than so many bytes move, of all ranks together, in runs of so many. Less is soon
  // sent; short runs are soon packed, and reading them costs a lookup of their page each.
  bool use_peer_memory = true;
  std::int64_t peer_sent_bytes = std::int64_t{1} << 20;
  std::int64_t peer_run_bytes = 512;
};

// This rank's shards before and after, in the order of their `local` index; contiguous, of one dtype.
struct Exchange {
  const ProcessGroup& group;
  const ReshardPlan& plan;
  const std::vector<at::Tensor>& sources;
  const std::vector<at::Tensor>& destinations;
  at::ScalarType dtype;

  bool stays(const Move& move) const { return plan.source_rank(move) == plan.destination_rank(move); }
  bool is_taken_here(const Move& move) const { return plan.source_rank(move) == group.rank(); }
  bool is_given_here(const Move& move) const { return plan.destination_rank(move) == group.rank(); }
  // The part of a shard of this rank that is `box`.
  at::Tensor taken(const Move& move, BoxView box) const;
  at::Tensor given(const Move& move, BoxView box) const;
  // Copies what is of this rank before and after.
  void copy_what_stays() const;
};

// Each returns how many bytes came from each rank.
using ReceivedBytes = std::vector<std::int64_t>;
ReceivedBytes exchange(const Exchange& exchange, const ExchangeOptions& options);
ReceivedBytes exchange_by_collective(const Exchange& exchange, std::int64_t round_bytes);
ReceivedBytes exchange_by_peer_memory(const Exchange& exchange);

}  // namespace tessera
