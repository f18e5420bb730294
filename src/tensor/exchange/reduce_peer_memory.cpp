#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/mul.h>

#include <algorithm>
#include <vector>

#include "tensor/exchange/reduce.h"
#include "tensor/exchange/stretches.h"
#include "tessera/comm/internal/peer_memory.h"
#include "tessera/tensor/internal/box_view.h"
#include "tessera/tensor/internal/empty_shard.h"

namespace tessera {

namespace {

// Bytes that are read and reduced at once. This fits into the cache and is too small for LibTorch to use threads.
constexpr std::int64_t kPieceBytes = std::int64_t{64} << 10;

void combine(at::Tensor& out, const at::Tensor& a, const at::Tensor& b, ReduceOp op) {
  switch (op) {
    case ReduceOp::sum:
    case ReduceOp::average:
      at::add_out(out, a, b);
      break;
    case ReduceOp::product:
      at::mul_out(out, a, b);
      break;
    case ReduceOp::min:
      at::minimum_out(out, a, b);
      break;
    case ReduceOp::max:
      at::maximum_out(out, a, b);
      break;
  }
}

// Reduces `box` of all ranks' local tensors, which are at peers.addresses()[0], into `out`, of the box's sizes.
void reduce_box(const ProcessGroup& group, const comm::PeerMemory& peers, const at::Tensor& local, const Box& box,
                const at::Tensor& out, ReduceOp op) {
  const auto element_bytes = static_cast<std::int64_t>(local.element_size());
  const Box full = Box::full(local.sizes());
  const at::Tensor read = at::empty({2, std::max(kPieceBytes / element_bytes, std::int64_t{1})}, local.options());
  for (const Box& piece : split_row_major(box, element_bytes, kPieceBytes)) {
    const auto of_rank = [&](int rank, std::int64_t place) {
      if (rank == group.rank()) return box_view(local, piece);
      at::Tensor theirs = read[place].narrow(0, 0, volume(piece)).view(piece.sizes);
      peers.read(rank, {{theirs.data_ptr(), theirs.nbytes()}},
                 stretches_of(piece, full, element_bytes, peers.addresses(rank)[0]));
      return theirs;
    };
    at::Tensor result = box_view(out, box, piece), so_far = of_rank(0, 0);
    for (int rank = 1; rank < group.size(); ++rank) {
      combine(result, so_far, of_rank(rank, 1), op);
      so_far = result;
    }
    if (op == ReduceOp::average) result.div_(group.size());
  }
}

}  // namespace

bool is_reduced_in_memory(at::ScalarType type) {
  return type == at::kFloat || type == at::kDouble || type == at::kLong || type == at::kInt;
}

at::Tensor all_reduced_by_peer_memory(const ProcessGroup& group, const at::Tensor& local, ReduceOp op) {
  at::Tensor reduced = empty_shard(local.sizes(), local.options().requires_grad(false));
  const at::Tensor from = local.view({-1}), to = reduced.view({-1});
  const std::int64_t ranks = group.size(), count = (to.numel() + ranks - 1) / ranks;
  const auto part_of = [&](std::int64_t rank) {
    const std::int64_t begin = std::min(rank * count, to.numel());
    return Box({begin}, {std::min(begin + count, to.numel()) - begin});
  };
  const std::vector<std::uint64_t> addresses = {address_of(from), address_of(to)};
  const comm::PeerMemory peers(group, addresses);
  const Box mine = part_of(group.rank());
  reduce_box(group, peers, from, mine, box_view(to, mine), op);
  group.barrier();
  const auto element_bytes = static_cast<std::int64_t>(local.element_size());
  const Box full = Box::full(to.sizes());
  for (std::int64_t i = 1; i < ranks; ++i) {  // each rank starts with a different peer
    const std::int64_t rank = (group.rank() + i) % ranks;
    for (const Box& piece : split_row_major(part_of(rank), element_bytes, kReadBytes)) {
      peers.read(static_cast<int>(rank), stretches_of(piece, full, element_bytes, addresses[1]),
                 stretches_of(piece, full, element_bytes, peers.addresses(static_cast<int>(rank))[1]));
    }
  }
  peers.finish();
  return reduced;
}

at::Tensor reduce_scattered_by_peer_memory(const ProcessGroup& group, const at::Tensor& local, ReduceOp op,
                                           std::int64_t dim) {
  const std::int64_t length = local.size(dim), rows = (length + group.size() - 1) / group.size();
  const auto d = static_cast<std::size_t>(dim);
  Box mine = Box::full(local.sizes());
  mine.offsets[d] = std::min(group.rank() * rows, length);
  mine.sizes[d] = std::min(mine.offsets[d] + rows, length) - mine.offsets[d];
  at::Tensor out = empty_shard(mine.sizes, local.options().requires_grad(false));
  const comm::PeerMemory peers(group, std::vector<std::uint64_t>{address_of(local)});
  reduce_box(group, peers, local, mine, out, op);
  peers.finish();
  return out;
}

}  // namespace tessera
