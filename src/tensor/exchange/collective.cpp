#include <ATen/ops/empty.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <utility>

#include "tensor/exchange/box_copy.h"
#include "tensor/exchange/exchange.h"
#include "tessera/layout/flat_interval.h"

namespace tessera {

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

// The buffers of a round. Two rounds may run at once.
struct InFlight {
  explicit InFlight(const at::TensorOptions& options) : in(options), out(options) {}
  Staging in, out;
  at::Tensor received;
  PendingCollective pending;
};

}  // namespace

ReceivedBytes exchange_by_collective(const Exchange& exchange, std::int64_t round_bytes) {
  const std::vector<Round> rounds = split_into_rounds(exchange, round_bytes);
  ReceivedBytes received_bytes(static_cast<std::size_t>(exchange.group.size()), 0);
  const at::TensorOptions options = at::TensorOptions().dtype(exchange.dtype).device(exchange.staging_device);
  std::array<InFlight, 2> flights = {InFlight(options), InFlight(options)};

  const auto start = [&](std::size_t r) {
    InFlight& flight = flights[r % 2];
    const std::vector<std::int64_t> in_splits = splits_of(rounds[r].sent), out_splits = splits_of(rounds[r].received);
    const at::Tensor in = flight.in.take(total(in_splits));
    each_piece(in, rounds[r].sent, [&](const at::Tensor& packed, const Piece& piece) {
      copy_elements(packed, exchange.taken(*piece.move, piece.box));
    });
    flight.received = flight.out.take(total(out_splits));
    flight.pending = exchange.group.start_all_to_all(flight.received, in, out_splits, in_splits);
    for (std::size_t rank = 0; rank < out_splits.size(); ++rank) {
      received_bytes[rank] += out_splits[rank] * exchange.element_bytes();
    }
  };
  const auto finish = [&](std::size_t r) {
    InFlight& flight = flights[r % 2];
    flight.pending.wait();
    each_piece(flight.received, rounds[r].received, [&](const at::Tensor& packed, const Piece& piece) {
      copy_elements(exchange.given(*piece.move, piece.box), packed);
    });
  };

  if (!rounds.empty()) start(0);
  exchange.copy_what_stays();
  for (std::size_t r = 0; r < rounds.size(); ++r) {
    if (r + 1 < rounds.size()) start(r + 1);
    finish(r);
  }
  return received_bytes;
}

}  // namespace tessera
