#include "tensor/exchange/reduce.h"

#include <ATen/ops/zeros.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <vector>

#include "tensor/exchange/box_copy.h"
#include "tensor/exchange/exchange.h"
#include "tensor/exchange/pieces.h"
#include "tessera/comm/internal/shared_memory.h"
#include "tessera/tensor/internal/empty_shard.h"

namespace tessera {

namespace {

using Sizes = std::vector<std::int64_t>;

// Size of a chunk that is copied while the previous one is reduced.
constexpr std::int64_t kReducedBytes = std::int64_t{16} << 20;

at::TensorOptions reduction_options(const at::Tensor& tensor) {
  return at::TensorOptions().dtype(tensor.scalar_type()).device(tensor.device());
}

// Returns the same on all ranks.
bool is_shared(const ProcessGroup& group, const at::Tensor& local) {
  return local.is_cpu() && comm::SharedMemory::is_available(group);
}

// The chunks of a tensor along `dim`, as torch.chunk splits, one for each rank. The last ones may be empty.
struct Chunks {
  std::int64_t dim, length, rows;

  Chunks(const ProcessGroup& group, const at::Tensor& tensor, std::int64_t along)
      : dim(along), length(tensor.size(along)), rows((length + group.size() - 1) / group.size()) {}
  std::int64_t begin(std::int64_t rank) const { return std::min(rank * rows, length); }
  std::int64_t count(std::int64_t rank) const { return begin(rank + 1) - begin(rank); }
  // Returns how many adjacent elements a full chunk has. Follows from sizes alone, so it is the same on all ranks:
  // strides of dimensions of length 1 are arbitrary, also in contiguous tensors.
  std::int64_t run_length(at::IntArrayRef sizes) const {
    return std::accumulate(sizes.begin() + dim + 1, sizes.end(), rows, std::multiplies<>());
  }
  Box box(at::IntArrayRef sizes, std::int64_t rank) const {
    Box chunk = Box::full(sizes);
    chunk.offsets[static_cast<std::size_t>(dim)] = begin(rank);
    chunk.sizes[static_cast<std::size_t>(dim)] = count(rank);
    return chunk;
  }
};

// Reduces the parts of a contiguous tensor where they are.
std::function<at::Tensor()> start_shared_reduce_scatter(const ProcessGroup& group, const at::Tensor& local, ReduceOp op,
                                                        const Chunks& chunks) {
  const Box full = Box::full(local.sizes());
  std::vector<comm::MemoryPieces> parts;
  for (std::int64_t rank = 0; rank < group.size(); ++rank)
    parts.push_back(pieces_of_box(chunks.box(local.sizes(), rank), full, local));
  at::Tensor out = empty_shard(chunks.box(local.sizes(), group.rank()).sizes, reduction_options(local));
  return
      [out, pending = comm::SharedMemory::start_reduce_scatter(group, out, std::move(parts), {local}, op)]() mutable {
        pending.wait();
        return out;
      };
}

// Copies the chunks one after the other, each padded to the length of the first one, unless they are so already.
at::Tensor padded_chunks(const ProcessGroup& group, const at::Tensor& local, const Chunks& chunks) {
  const std::int64_t ranks = group.size();
  if (chunks.dim == 0 && chunks.length == ranks * chunks.rows) return local;
  Sizes sizes = local.sizes().vec();
  sizes[static_cast<std::size_t>(chunks.dim)] = chunks.rows;
  sizes.insert(sizes.begin(), ranks);
  at::Tensor all = chunks.length == ranks * chunks.rows ? empty_shard(sizes, reduction_options(local))
                                                        : at::zeros(sizes, reduction_options(local));
  for (std::int64_t rank = 0; rank < ranks; ++rank) {
    copy_elements(all[rank].narrow(chunks.dim, 0, chunks.count(rank)),
                  local.narrow(chunks.dim, chunks.begin(rank), chunks.count(rank)));
  }
  return all;
}

}  // namespace

std::function<at::Tensor()> start_all_reduce(const ProcessGroup& group, const at::Tensor& local, ReduceOp op) {
  at::Tensor reduced = empty_shard(local.sizes(), reduction_options(local));
  const at::Tensor from = local.contiguous();
  std::vector<PendingCollective> pending;
  if (is_shared(group, from)) {
    pending.push_back(comm::SharedMemory::start_all_reduce(group, reduced, from, op));
  } else {
    const at::Tensor flat = from.view({-1}), to = reduced.view({-1});
    const auto step = std::max<std::int64_t>(kReducedBytes / static_cast<std::int64_t>(local.element_size()), 1);
    for (std::int64_t begin = 0; begin == 0 || begin < to.numel(); begin += step) {
      const std::int64_t count = std::min(step, to.numel() - begin);
      const at::Tensor part = to.narrow(0, begin, count);
      copy_elements(part, flat.narrow(0, begin, count));
      pending.push_back(group.start_all_reduce(part, op));
    }
  }
  return [reduced, pending = std::move(pending)]() mutable {
    for (PendingCollective& one : pending) one.wait();
    return reduced;
  };
}

std::function<at::Tensor()> start_reduce_scatter(const ProcessGroup& group, const at::Tensor& local, ReduceOp op,
                                                 std::int64_t dim) {
  const at::Tensor from = local.contiguous();
  const Chunks chunks(group, from, dim);
  const auto item_bytes = static_cast<std::int64_t>(from.element_size());
  if (is_shared(group, from) && chunks.run_length(from.sizes()) * item_bytes >= ExchangeOptions().run_bytes)
    return start_shared_reduce_scatter(group, from, op, chunks);
  const at::Tensor in = padded_chunks(group, from, chunks);
  Sizes sizes = from.sizes().vec();
  sizes[static_cast<std::size_t>(dim)] = chunks.rows;
  const at::Tensor out = empty_shard(sizes, reduction_options(from));
  return
      [out, dim, count = chunks.count(group.rank()), pending = group.start_reduce_scatter_into(out, in, op)]() mutable {
        pending.wait();
        return out.narrow(dim, 0, count).contiguous();
      };
}

at::Tensor all_reduced(const ProcessGroup& group, const at::Tensor& local, ReduceOp op) {
  return start_all_reduce(group, local, op)();
}

at::Tensor reduce_scattered(const ProcessGroup& group, const at::Tensor& local, ReduceOp op, std::int64_t dim) {
  return start_reduce_scatter(group, local, op, dim)();
}

}  // namespace tessera
