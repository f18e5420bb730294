#include "tensor/exchange/exchange.h"

#include "tensor/exchange/box_copy.h"
#include "tessera/comm/internal/peer_memory.h"
#include "tessera/tensor/internal/box_view.h"

namespace tessera {

at::Tensor Exchange::taken(const Move& move, BoxView box) const {
  return box_view(sources[move.source], plan.sources[move.source], box);
}

at::Tensor Exchange::given(const Move& move, BoxView box) const {
  return box_view(destinations[move.destination], plan.destinations[move.destination], box);
}

void Exchange::copy_what_stays() const {
  for (const Move& move : plan.moves) {
    if (stays(move)) copy_elements(given(move, move.box), taken(move, move.box));
  }
}

ReceivedBytes exchange(const Exchange& exchange, const ExchangeOptions& options) {
  const ExchangeSize& size = exchange.plan.size;
  const bool reading_pays = options.use_peer_memory && exchange.is_on_cpu &&
                            size.sent * exchange.element_bytes() >= options.peer_sent_bytes &&
                            size.run_length * exchange.element_bytes() >= options.peer_run_bytes;
  if (reading_pays && comm::PeerMemory::is_available(exchange.group)) return exchange_by_peer_memory(exchange);
  return exchange_by_collective(exchange, options.round_bytes);
}

}  // namespace tessera
