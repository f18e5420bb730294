#include "tensor/sharded/reshard_plan.h"

#include <algorithm>
#include <utility>

#include "tensor/dtensor/placement.h"
#include "tessera/layout/redistribution.h"

namespace tessera {

namespace {

// Where a shard is: its rank, and its index among the rank's shards.
struct ShardPlace {
  int rank = 0;
  std::size_t local = 0;
};

std::vector<ShardPlace> places_of(const std::vector<ShardMetadata>& shards, const ProcessGroup& group) {
  std::vector<ShardPlace> places(shards.size());
  const auto by_rank = shards_by_rank(shards, group);
  for (std::size_t rank = 0; rank < by_rank.size(); ++rank) {
    for (std::size_t local = 0; local < by_rank[rank].size(); ++local)
      places[by_rank[rank][local]] = {static_cast<int>(rank), local};
  }
  return places;
}

// Returns the boxes of a rank's shards, by their index among them.
std::vector<Box> boxes_on(int rank, const std::vector<ShardMetadata>& shards, const std::vector<ShardPlace>& places) {
  std::vector<Box> boxes;
  for (std::size_t i = 0; i < shards.size(); ++i) {
    if (places[i].rank != rank) continue;
    boxes.resize(std::max(boxes.size(), places[i].local + 1));
    boxes[places[i].local] = Box(shards[i].box());
  }
  return boxes;
}

}  // namespace

bool are_on_cpu(const std::vector<ShardMetadata>& shards) {
  return std::all_of(shards.begin(), shards.end(),
                     [](const ShardMetadata& shard) { return shard.placement->device().type == "cpu"; });
}

ReshardPlan plan_reshard(const ShardedTensorMetadata& from, const ShardedTensorMetadata& to,
                         const ProcessGroup& group) {
  const std::vector<ShardPlace> sources = places_of(from.shards_metadata, group);
  const std::vector<ShardPlace> destinations = places_of(to.shards_metadata, group);
  const std::size_t dims = from.size.size();
  const BoxList has = boxes_of(from.shards_metadata, dims), wants = boxes_of(to.shards_metadata, dims);
  ReshardPlan plan;
  plan.sources = boxes_on(group.rank(), from.shards_metadata, sources);
  plan.destinations = boxes_on(group.rank(), to.shards_metadata, destinations);
  ExchangeSizeSum sum;
  for (Transfer& transfer : plan_transfers(has, wants)) {
    const ShardPlace &source = sources[transfer.source], &destination = destinations[transfer.destination];
    sum.add(source.rank, destination.rank, transfer.box, has[transfer.source], wants[transfer.destination]);
    if (source.rank != group.rank() && destination.rank != group.rank()) continue;
    plan.moves.push_back({source.rank, destination.rank, source.local, destination.local, std::move(transfer.box)});
  }
  plan.size = sum.total();
  return plan;
}

}  // namespace tessera
