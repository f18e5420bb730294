#include "tensor/sharded/reshard_plan.h"

#include <algorithm>

#include "tensor/dtensor/placement.h"
#include "tessera/layout/redistribution.h"

namespace tessera {

namespace {

std::vector<ShardPlace> places_of(const std::vector<ShardMetadata>& shards, const ProcessGroup& group) {
  std::vector<ShardPlace> places(shards.size());
  const auto by_rank = shards_by_rank(shards, group);
  for (std::size_t rank = 0; rank < by_rank.size(); ++rank) {
    for (std::size_t local = 0; local < by_rank[rank].size(); ++local) {
      const std::size_t i = by_rank[rank][local];
      places[i] = {static_cast<int>(rank), local, Box(shards[i].box())};
    }
  }
  return places;
}

bool are_on_cpu(const std::vector<ShardMetadata>& shards) {
  return std::all_of(shards.begin(), shards.end(),
                     [](const ShardMetadata& shard) { return shard.placement->device().type == "cpu"; });
}

// Returns the number of contiguous runs of `box` in the row-major `chunk`.
std::int64_t count_runs(BoxView box, BoxView chunk) {
  std::int64_t run = 1;
  for (std::size_t d = box.rank(); d-- > 0;) {
    run *= box.sizes[d];
    if (box.sizes[d] != chunk.sizes[d]) break;
  }
  return volume(box) / run;
}

}  // namespace

std::int64_t ReshardPlan::sent_bytes() const {
  std::int64_t sum = 0;
  for (const Move& move : moves) {
    if (source_rank(move) != destination_rank(move)) sum += bytes(move);
  }
  return sum;
}

std::int64_t ReshardPlan::mean_run_bytes() const {
  std::int64_t source_runs = 0, destination_runs = 0;
  for (const Move& move : moves) {
    if (source_rank(move) == destination_rank(move)) continue;
    source_runs += count_runs(move.box, sources[move.source].box);
    destination_runs += count_runs(move.box, destinations[move.destination].box);
  }
  const std::int64_t runs = std::max(source_runs, destination_runs);
  return runs == 0 ? 0 : sent_bytes() / runs;
}

ReshardPlan plan_reshard(const ShardedTensorMetadata& from, const ShardedTensorMetadata& to, std::int64_t element_bytes,
                         const ProcessGroup& group) {
  ReshardPlan plan;
  plan.sources = places_of(from.shards_metadata, group);
  plan.destinations = places_of(to.shards_metadata, group);
  plan.element_bytes = element_bytes;
  plan.staging_device = staging_device(from.shards_metadata);
  plan.is_on_cpu = are_on_cpu(from.shards_metadata) && are_on_cpu(to.shards_metadata);
  const std::size_t dims = from.size.size();
  for (Transfer& transfer : plan_transfers(boxes_of(from.shards_metadata, dims), boxes_of(to.shards_metadata, dims))) {
    plan.moves.push_back({transfer.source, transfer.destination, std::move(transfer.box)});
  }
  return plan;
}

}  // namespace tessera
