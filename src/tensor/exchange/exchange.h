#pragma once
// Moves elements between ranks by a plan, from existing shards into new ones, in one of two ways:
//
//   by collective    All-to-alls of bounded size. While one runs, the elements of the next are packed and those of the
//                    previous unpacked, through staging buffers that stay in the cache. Any backend, any device.
//   by peer memory   Each rank copies the elements of its new shards out of the other ranks' memory. All ranks must be
//                    on one host and the tensor on CPU.
//
// All ranks must choose the same way, with the same options.

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <vector>

#include "tensor/sharded/reshard_plan.h"
#include "tessera/comm/process_group.h"

namespace tessera {

struct ExchangeOptions {
  // Most bytes that a rank sends in one round of the exchange by collective; at least one element goes to each rank.
  std::int64_t round_bytes = std::int64_t{4} << 20;
  // Peers' memory is read if all ranks together move more than peer_sent_bytes, in runs of at least peer_run_bytes on
  // average. For less, sending is fast enough. Short runs are cheap to pack, while reading each costs a page lookup.
  bool use_peer_memory = true;
  std::int64_t peer_sent_bytes = std::int64_t{1} << 20;
  std::int64_t peer_run_bytes = 512;
};

// This rank's source and destination shards, in the order of their `local` index; contiguous, of one dtype.
struct Exchange {
  const ProcessGroup& group;
  const ReshardPlan& plan;
  const std::vector<at::Tensor>& sources;
  const std::vector<at::Tensor>& destinations;
  at::ScalarType dtype;
  // Where elements are packed to be sent; whether the tensors of all ranks are on CPU.
  at::Device staging_device;
  bool is_on_cpu;

  std::int64_t element_bytes() const { return static_cast<std::int64_t>(c10::elementSize(dtype)); }
  bool stays(const Move& move) const { return move.source_rank == move.destination_rank; }
  bool is_taken_here(const Move& move) const { return move.source_rank == group.rank(); }
  // Return the part `box` of this rank's source or destination shard.
  at::Tensor taken(const Move& move, BoxView box) const;
  at::Tensor given(const Move& move, BoxView box) const;
  // Copies the elements that stay on this rank.
  void copy_what_stays() const;
};

// Each returns the bytes received from each rank.
using ReceivedBytes = std::vector<std::int64_t>;
ReceivedBytes exchange(const Exchange& exchange, const ExchangeOptions& options);
ReceivedBytes exchange_by_collective(const Exchange& exchange, std::int64_t round_bytes);
ReceivedBytes exchange_by_peer_memory(const Exchange& exchange);

}  // namespace tessera
