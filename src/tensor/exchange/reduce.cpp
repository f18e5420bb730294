#include "tensor/exchange/reduce.h"

#include <ATen/ops/zeros.h>

#include <algorithm>
#include <vector>

#include "tensor/exchange/box_copy.h"
#include "tensor/exchange/exchange.h"
#include "tessera/comm/internal/peer_memory.h"
#include "tessera/tensor/internal/empty_shard.h"

namespace tessera {

namespace {

using Sizes = std::vector<std::int64_t>;

// Size of a chunk that is copied while the previous one is reduced.
constexpr std::int64_t kReducedBytes = std::int64_t{16} << 20;

at::TensorOptions reduction_options(const at::Tensor& tensor) {
  return at::TensorOptions().dtype(tensor.scalar_type()).device(tensor.device());
}

// Returns the same on all ranks. `run_bytes`: the length of the contiguous runs that a rank reduces.
bool uses_peer_memory(const ProcessGroup& group, const at::Tensor& local, std::int64_t run_bytes) {
  const ExchangeOptions limits;
  return local.is_cpu() && is_reduced_in_memory(local.scalar_type()) &&
         static_cast<std::int64_t>(local.nbytes()) > limits.peer_sent_bytes && run_bytes >= limits.peer_run_bytes &&
         comm::PeerMemory::is_available(group);
}

}  // namespace

at::Tensor all_reduced_by_collective(const ProcessGroup& group, const at::Tensor& local, ReduceOp op) {
  at::Tensor reduced = empty_shard(local.sizes(), reduction_options(local));
  const at::Tensor from = local.contiguous().view({-1}), to = reduced.view({-1});
  const std::int64_t step = std::max<std::int64_t>(kReducedBytes / static_cast<std::int64_t>(local.element_size()), 1);
  std::vector<PendingCollective> pending;
  for (std::int64_t begin = 0; begin == 0 || begin < to.numel(); begin += step) {
    const std::int64_t count = std::min(step, to.numel() - begin);
    const at::Tensor part = to.narrow(0, begin, count);
    copy_elements(part, from.narrow(0, begin, count));
    pending.push_back(group.start_all_reduce(part, op));
  }
  for (PendingCollective& one : pending) one.wait();
  return reduced;
}

namespace {

// The buffers of a reduce-scatter along `dim`: chunks are padded to the length of the first one.
struct ScatterBuffers {
  std::int64_t dim, length, rows;
  at::Tensor in, out;

  ScatterBuffers(const ProcessGroup& group, const at::Tensor& local, std::int64_t along)
      : dim(along), length(local.size(along)), rows((length + group.size() - 1) / group.size()), in(local) {
    const std::int64_t ranks = group.size();
    Sizes size = local.sizes().vec();
    size[static_cast<std::size_t>(dim)] = rows;
    if (dim != 0 || length != ranks * rows || !local.is_contiguous()) {
      Sizes all = size;
      all.insert(all.begin(), ranks);
      in = length == ranks * rows ? empty_shard(all, reduction_options(local))
                                  : at::zeros(all, reduction_options(local));
      for (std::int64_t rank = 0; rank < ranks; ++rank) {
        const std::int64_t begin = begin_of(rank), count = begin_of(rank + 1) - begin;
        copy_elements(in[rank].narrow(dim, 0, count), local.narrow(dim, begin, count));
      }
    }
    out = empty_shard(size, reduction_options(local));
  }
  std::int64_t begin_of(std::int64_t rank) const { return std::min(rank * rows, length); }
  at::Tensor result(std::int64_t rank) const {
    return out.narrow(dim, 0, begin_of(rank + 1) - begin_of(rank)).contiguous();
  }
};

}  // namespace

at::Tensor reduce_scattered_by_collective(const ProcessGroup& group, const at::Tensor& local, ReduceOp op,
                                          std::int64_t dim) {
  const ScatterBuffers buffers(group, local, dim);
  group.reduce_scatter_into(buffers.out, buffers.in, op);
  return buffers.result(group.rank());
}

std::function<at::Tensor()> start_reduce_scatter(const ProcessGroup& group, const at::Tensor& local, ReduceOp op,
                                                 std::int64_t dim) {
  const ScatterBuffers buffers(group, local.contiguous(), dim);
  return
      [buffers, rank = group.rank(), pending = group.start_reduce_scatter_into(buffers.out, buffers.in, op)]() mutable {
        pending.wait();
        return buffers.result(rank);
      };
}

std::function<at::Tensor()> start_all_reduce(const ProcessGroup& group, const at::Tensor& local, ReduceOp op) {
  at::Tensor reduced = local.clone(at::MemoryFormat::Contiguous);
  return [reduced, pending = group.start_all_reduce(reduced, op)]() mutable {
    pending.wait();
    return reduced;
  };
}

at::Tensor all_reduced(const ProcessGroup& group, const at::Tensor& local, ReduceOp op) {
  const at::Tensor from = local.contiguous();
  return uses_peer_memory(group, from, static_cast<std::int64_t>(from.nbytes()))
             ? all_reduced_by_peer_memory(group, from, op)
             : all_reduced_by_collective(group, from, op);
}

at::Tensor reduce_scattered(const ProcessGroup& group, const at::Tensor& local, ReduceOp op, std::int64_t dim) {
  const at::Tensor from = local.contiguous();
  const std::int64_t rows = (local.size(dim) + group.size() - 1) / group.size();
  return uses_peer_memory(group, from, rows * from.stride(dim) * static_cast<std::int64_t>(from.element_size()))
             ? reduce_scattered_by_peer_memory(group, from, op, dim)
             : reduce_scattered_by_collective(group, from, op, dim);
}

}  // namespace tessera
