#include "tessera/comm/internal/peer_memory.h"
#include "tensor/exchange/exchange.h"
#include "tensor/exchange/stretches.h"

namespace tessera {

ReceivedBytes exchange_by_peer_memory(const Exchange& exchange) {
  const ReshardPlan& plan = exchange.plan;
  const std::int64_t element_bytes = exchange.element_bytes();
  const auto ranks = static_cast<std::size_t>(exchange.group.size());
  std::vector<std::uint64_t> addresses;
  for (const at::Tensor& tensor : exchange.sources) addresses.push_back(address_of(tensor));
  const comm::PeerMemory peers(exchange.group, addresses);
  exchange.copy_what_stays();

  std::vector<std::vector<const Move*>> by_rank(ranks);
  for (const Move& move : plan.moves) {
    if (!exchange.is_taken_here(move)) by_rank[static_cast<std::size_t>(move.source_rank)].push_back(&move);
  }
  ReceivedBytes received(ranks, 0);
  for (std::size_t i = 1; i < ranks; ++i) {  // each rank starts with a different peer
    const std::size_t rank = (static_cast<std::size_t>(exchange.group.rank()) + i) % ranks;
    const std::span<const std::uint64_t> theirs = peers.addresses(static_cast<int>(rank));
    for (const Move* move : by_rank[rank]) {
      const std::uint64_t from = theirs[move->source], to = address_of(exchange.destinations[move->destination]);
      for (const Box& piece : split_row_major(move->box, element_bytes, kReadBytes)) {
        peers.read(static_cast<int>(rank), stretches_of(piece, plan.destinations[move->destination], element_bytes, to),
                   stretches_of(piece, move->source_shard, element_bytes, from));
        received[rank] += volume(piece) * element_bytes;
      }
    }
  }
  peers.finish();
  return received;
}

}  // namespace tessera
