#pragma once
// Moves elements between ranks by a plan, from existing shards into new ones, in all-to-alls of bounded size: while one
// runs, the next is started and the previous finished. What ranks that share their host's memory exchange is copied
// from where it is to where it goes. Other elements, and short runs of them, are packed into staging buffers that stay
// in the cache, and unpacked; any backend, any device.
//
// All ranks must pass the same options.

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <vector>

#include "tensor/sharded/reshard_plan.h"
#include "tessera/comm/process_group.h"

namespace tessera {

struct ExchangeOptions {
  // Most bytes that a rank sends in one round of packed elements; at least one element goes to each rank.
  std::int64_t round_bytes = std::int64_t{4} << 20;
  // The same of elements that are not packed, whose runs have at least `run_bytes` on average.
  std::int64_t unpacked_round_bytes = std::int64_t{64} << 20;
  std::int64_t run_bytes = 512;
  bool use_shared_memory = true;
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

// Returns the bytes received from each rank.
using ReceivedBytes = std::vector<std::int64_t>;
ReceivedBytes exchange(const Exchange& exchange, const ExchangeOptions& options);

}  // namespace tessera
