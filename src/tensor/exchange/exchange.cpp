#include "tensor/exchange/exchange.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <utility>

#include "tensor/exchange/box_copy.h"
#include "tensor/exchange/pieces.h"
#include "tessera/comm/internal/shared_memory.h"
#include "tessera/layout/flat_interval.h"
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

namespace {

// The piece of a move that one round sends.
struct Piece {
  const Move* move;
  Box box;
};

// The pieces that this rank sends and receives in a round, by the other rank, in the order of the plan.
struct Round {
  explicit Round(std::size_t ranks) : sent(ranks), received(ranks) {}
  std::vector<std::vector<Piece>> sent, received;
};

// Returns the elements [begin, end) of a box, in row-major order, as boxes.
std::vector<Box> boxes_of_elements(const Box& box, std::int64_t begin, std::int64_t end) {
  std::vector<Box> boxes = boxes_of_flat_interval(box.sizes, begin, end);
  for (Box& part : boxes) {
    for (std::size_t d = 0; d < box.rank(); ++d) part.offsets[d] += box.offsets[d];
  }
  return boxes;
}

// Splits what this rank sends to each other rank, and gets from it, into rounds of equal size. How many there are
// follows from the largest message of any two ranks, so it is the same on all.
std::vector<Round> split_into_rounds(const Exchange& exchange, std::int64_t round_bytes) {
  const auto ranks = static_cast<std::size_t>(exchange.group.size());
  const std::int64_t others = std::max<int>(exchange.group.size() - 1, 1);
  const std::int64_t in_round = std::max<std::int64_t>(round_bytes / others / exchange.element_bytes(), 1);
  const std::int64_t most = exchange.plan.size.largest_message;
  std::vector<Round> rounds(static_cast<std::size_t>((most + in_round - 1) / in_round), Round(ranks));
  std::vector<std::int64_t> sent(ranks, 0), received(ranks, 0);  // elements so far, by the other rank
  for (const Move& move : exchange.plan.moves) {
    if (exchange.stays(move)) continue;
    const bool sends = exchange.is_taken_here(move);
    const auto other = static_cast<std::size_t>(sends ? move.destination_rank : move.source_rank);
    std::int64_t& position = (sends ? sent : received)[other];
    const std::int64_t elements = volume(move.box);
    for (std::int64_t begin = 0; begin < elements;) {
      const std::int64_t end = std::min(elements, begin + in_round - position % in_round);
      Round& round = rounds.at(static_cast<std::size_t>(position / in_round));
      for (Box& box : boxes_of_elements(move.box, begin, end))
        (sends ? round.sent : round.received)[other].push_back({&move, std::move(box)});
      position += end - begin;
      begin = end;
    }
  }
  return rounds;
}

std::vector<std::int64_t> splits_of(const std::vector<std::vector<Piece>>& pieces) {
  std::vector<std::int64_t> splits;
  splits.reserve(pieces.size());
  for (const std::vector<Piece>& of_rank : pieces) {
    splits.push_back(std::accumulate(of_rank.begin(), of_rank.end(), std::int64_t{0},
                                     [](std::int64_t sum, const Piece& piece) { return sum + volume(piece.box); }));
  }
  return splits;
}

std::int64_t total(const std::vector<std::int64_t>& splits) {
  return std::accumulate(splits.begin(), splits.end(), std::int64_t{0});
}

// Memory that is reused in every round.
class Staging {
 public:
  explicit Staging(const at::TensorOptions& options) : memory_(at::empty({0}, options)) {}
  at::Tensor take(std::int64_t count) {
    if (memory_.numel() < count) memory_ = at::empty({count}, memory_.options());
    return memory_.narrow(0, 0, count);
  }

 private:
  at::Tensor memory_;
};

// Calls copy(packed, piece) for each piece, where `packed` is its part of `buffer`.
template <typename Copy>
void each_piece(const at::Tensor& buffer, const std::vector<std::vector<Piece>>& pieces, const Copy& copy) {
  std::int64_t begin = 0;
  for (const std::vector<Piece>& of_rank : pieces) {
    for (const Piece& piece : of_rank) {
      const std::int64_t count = volume(piece.box);
      copy(buffer.narrow(0, begin, count).view(piece.box.sizes), piece);
      begin += count;
    }
  }
}

// A round through buffers in which its elements are packed.
class PackedRound {
 public:
  explicit PackedRound(const Exchange& exchange)
      : exchange_(exchange), in_(options_of(exchange)), out_(options_of(exchange)) {}

  void start(const Round& round) {
    const std::vector<std::int64_t> in_splits = splits_of(round.sent), out_splits = splits_of(round.received);
    const at::Tensor in = in_.take(total(in_splits));
    each_piece(in, round.sent, [&](const at::Tensor& packed, const Piece& piece) {
      copy_elements(packed, exchange_.taken(*piece.move, piece.box));
    });
    received_ = out_.take(total(out_splits));
    pending_ = exchange_.group.start_all_to_all(received_, in, out_splits, in_splits);
  }
  void finish(const Round& round) {
    pending_.wait();
    each_piece(received_, round.received, [&](const at::Tensor& packed, const Piece& piece) {
      copy_elements(exchange_.given(*piece.move, piece.box), packed);
    });
  }

 private:
  static at::TensorOptions options_of(const Exchange& exchange) {
    return at::TensorOptions().dtype(exchange.dtype).device(exchange.staging_device);
  }

  const Exchange& exchange_;
  Staging in_, out_;
  at::Tensor received_;
  PendingCollective pending_;
};

// A round between the shards of ranks that share memory.
class UnpackedRound {
 public:
  explicit UnpackedRound(const Exchange& exchange) : exchange_(exchange) {}

  void start(const Round& round) {
    const ReshardPlan& plan = exchange_.plan;
    const auto ins = pieces_of(round.sent, [&](const Piece& piece) {
      return pieces_of_box(piece.box, plan.sources[piece.move->source], exchange_.sources[piece.move->source]);
    });
    const auto outs = pieces_of(round.received, [&](const Piece& piece) {
      const std::size_t destination = piece.move->destination;
      return pieces_of_box(piece.box, plan.destinations[destination], exchange_.destinations[destination]);
    });
    std::vector<at::Tensor> kept = exchange_.sources;
    kept.insert(kept.end(), exchange_.destinations.begin(), exchange_.destinations.end());
    pending_ = comm::SharedMemory::start_all_to_all(exchange_.group, outs, ins, std::move(kept));
  }
  void finish(const Round& /*round*/) { pending_.wait(); }

 private:
  template <typename InMemory>
  static std::vector<comm::MemoryPieces> pieces_of(const std::vector<std::vector<Piece>>& by_rank,
                                                   const InMemory& in_memory) {
    std::vector<comm::MemoryPieces> pieces(by_rank.size());
    for (std::size_t rank = 0; rank < by_rank.size(); ++rank) {
      for (const Piece& piece : by_rank[rank]) {
        const comm::MemoryPieces more = in_memory(piece);
        pieces[rank].insert(pieces[rank].end(), more.begin(), more.end());
      }
    }
    return pieces;
  }

  const Exchange& exchange_;
  PendingCollective pending_;
};

template <typename RoundInFlight>
ReceivedBytes run_rounds(const Exchange& exchange, std::int64_t round_bytes) {
  const std::vector<Round> rounds = split_into_rounds(exchange, round_bytes);
  std::array<RoundInFlight, 2> flights = {RoundInFlight(exchange), RoundInFlight(exchange)};
  if (!rounds.empty()) flights[0].start(rounds[0]);
  exchange.copy_what_stays();
  ReceivedBytes received(static_cast<std::size_t>(exchange.group.size()), 0);
  for (std::size_t r = 0; r < rounds.size(); ++r) {
    if (r + 1 < rounds.size()) flights[(r + 1) % 2].start(rounds[r + 1]);
    flights[r % 2].finish(rounds[r]);
    const std::vector<std::int64_t> elements = splits_of(rounds[r].received);
    for (std::size_t rank = 0; rank < elements.size(); ++rank)
      received[rank] += elements[rank] * exchange.element_bytes();
  }
  return received;
}

}  // namespace

ReceivedBytes exchange(const Exchange& exchange, const ExchangeOptions& options) {
  const bool is_unpacked = options.use_shared_memory && exchange.is_on_cpu &&
                           exchange.plan.size.run_length * exchange.element_bytes() >= options.run_bytes &&
                           comm::SharedMemory::is_available(exchange.group);
  return is_unpacked ? run_rounds<UnpackedRound>(exchange, options.unpacked_round_bytes)
                     : run_rounds<PackedRound>(exchange, options.round_bytes);
}

}  // namespace tessera
