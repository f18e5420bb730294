#include "tensor/exchange/exchange.h"

#include "tensor/exchange/box_copy.h"
#include "tessera/comm/internal/peer_memory.h"
#include "tessera/tensor/internal/box_view.h"

namespace tessera {

at::Tensor Exchange::taken(const Move& move, BoxView box) const {
  const ShardPlace& place = plan.sources[move.source];
  return box_view(sources[place.local], place.box, box);
}

at::Tensor Exchange::given(const Move& move, BoxView box) const {
  const ShardPlace& place = plan.destinations[move.destination];
  return box_view(destinations[place.local], place.box, box);
}

void Exchange::copy_what_stays() const {
  for (const Move& move : plan.moves) {
    if (stays(move) && is_taken_here(move)) copy_elements(given(move, move.box), taken(move, move.box));
  }
}

ReceivedBytes exchange(const Exchange& exchange, const ExchangeOptions& options) {
  const ReshardPlan& plan = exchange.plan;
  const bool reading_pays = options.use_peer_memory && plan.is_on_cpu && plan.sent_bytes() >= options.peer_sent_bytes &&
                            plan.mean_run_bytes() >= options.peer_run_bytes;
  if (reading_pays && comm::PeerMemory::is_available(exchange.group)) return exchange_by_peer_memory(exchange);
  return exchange_by_collective(exchange, options.round_bytes);
}

}  // namespace tessera
