#pragma once
/// \file
/// Ranks that work together: a thin value over c10d, with collectives on flat buffers.
///
/// Every function that communicates is a collective: all ranks of the group call it, in the same order, with arguments
/// that fit together, from one thread at a time. It returns when its results may be used: on CPU they are there, on
/// CUDA the current stream waits for them. Tensors must be contiguous; those that only move elements take every dtype,
/// also those that the backend doesn't know. NCCL carries CUDA's tensors, and Gloo beside it those of the CPU. Ranks
/// are ranks of this group.
///
/// Law: a group of one rank does what a group of any size does, without communicating.
///
/// Errors. What is wrong with this rank's arguments is `Error(invalid_argument)` before anything is sent. If another
/// rank dies, leaves, or hasn't come within the timeout, every rank that waits gets `Error(rank_failure)` that says
/// which collective, which ranks and why. After that the group is broken, and whatever is called on it throws the same.
///
/// Copies are the same group. The last one to be destroyed says that this rank has left.
/// PyTorch: torch/distributed/distributed_c10d.py.

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/bytes.h"
#include "tessera/base/error.h"
#include "tessera/base/rank_errors.h"
#include "tessera/base/reduce_op.h"

namespace tessera {

namespace comm {
class PeerMemory;
}

/// A collective that has begun and may still run. It keeps its tensors alive, also if nobody waits for it; until it has
/// ended, what it reads must not be changed, and what it writes must not be used.
class PendingCollective {
 public:
  /// One that has ended.
  PendingCollective() = default;
  /// Returns when its results may be used, as the collective itself would; throws what that would throw.
  /// Those of a group may be waited for in any order. A second call does nothing.
  void wait();

 private:
  friend class ProcessGroup;
  struct State;
  std::shared_ptr<State> state_;
};

class ProcessGroup {
 public:
  /// This process alone.
  ProcessGroup();

  int rank() const;
  int size() const;
  /// "gloo", "nccl", "mpi"; "alone" for a group of one rank that needs none.
  const std::string& backend() const;
  /// What each rank is in the world that this group stems from, ascending by rank of this group.
  const std::vector<int>& world_ranks() const;
  int world_rank() const { return world_ranks()[static_cast<std::size_t>(rank())]; }
  int world_size() const;
  /// How long a rank waits for the others in a collective.
  std::chrono::milliseconds timeout() const;

  /// `tensor` of `root` becomes everyone's.
  void broadcast(const at::Tensor& tensor, int root) const;
  /// Element-wise over the ranks, the same bits on each. Every dtype that the LibTorch here can add.
  void all_reduce(const at::Tensor& tensor, ReduceOp op = ReduceOp::sum) const;
  /// `out` becomes all ranks' `in`, one behind the other: out.numel() == size() * in.numel(), equal on all ranks.
  void all_gather_into(const at::Tensor& out, const at::Tensor& in) const;
  /// `out` becomes this rank's part of the reduced `in`: in.numel() == size() * out.numel(), equal on all ranks.
  void reduce_scatter_into(const at::Tensor& out, const at::Tensor& in, ReduceOp op = ReduceOp::sum) const;
  /// Of `in` the next in_splits[r] elements go to rank r; in `out` the next out_splits[r] come from rank r. The splits
  /// add up to the numel, and what r sends to s is what s expects from r.
  void all_to_all(const at::Tensor& out, const at::Tensor& in, std::span<const std::int64_t> out_splits,
                  std::span<const std::int64_t> in_splits) const;
  /// These begun: they return before they have ended, and other collectives may begin before they are waited
  /// for. What a rank does alone, such as the sum where the backend has none, is done by the wait.
  /// PyTorch: `async_op=True`.
  PendingCollective start_all_reduce(const at::Tensor& tensor, ReduceOp op = ReduceOp::sum) const;
  PendingCollective start_all_gather_into(const at::Tensor& out, const at::Tensor& in) const;
  PendingCollective start_reduce_scatter_into(const at::Tensor& out, const at::Tensor& in,
                                              ReduceOp op = ReduceOp::sum) const;
  PendingCollective start_all_to_all(const at::Tensor& out, const at::Tensor& in,
                                     std::span<const std::int64_t> out_splits,
                                     std::span<const std::int64_t> in_splits) const;
  /// On `root`, `out` becomes all ranks' `in`, one behind the other; elsewhere `out` is undefined (at::Tensor()).
  void gather(const at::Tensor& out, const at::Tensor& in, int root) const;
  /// `out` becomes this rank's part of root's `in`; elsewhere `in` is undefined.
  void scatter(const at::Tensor& out, const at::Tensor& in, int root) const;
  /// Returns when all ranks have called it. `timeout` is the group's unless given.
  void barrier(std::optional<std::chrono::milliseconds> timeout = std::nullopt) const;

  // Bytes, as many as each rank likes.
  std::vector<Bytes> all_gather_bytes(ByteView bytes) const;
  /// Empty but on `root`.
  std::vector<Bytes> gather_bytes(ByteView bytes, int root) const;
  /// Root's; what others bring is not looked at.
  Bytes broadcast_bytes(ByteView bytes, int root) const;
  /// Part r of root's goes to rank r; what others bring is not looked at.
  Bytes scatter_bytes(std::span<const Bytes> parts, int root) const;
  /// Part r goes to rank r; returns what each rank had for this one.
  std::vector<Bytes> all_to_all_bytes(std::span<const Bytes> parts) const;

  /// Each rank brings its failure in `step`, or null. If any does, every rank throws an `Error` that says the step, the
  /// ranks that failed and why: with their code if they have one in common, else rank_failure. Costs an all_reduce of
  /// 8 bytes where all is well.
  void agree(std::string_view step, const std::exception_ptr& failure) const;
  /// Runs `f` and agrees on how it ended; returns what it returned.
  template <typename F>
  auto agree_on(std::string_view step, F&& f) const;

  /// The group of these ranks of this one, in this order. All ranks of this group must call it with the same list;
  /// those that are not in it get nothing. Throws `Error(invalid_argument)` for ranks that aren't there or come twice.
  std::optional<ProcessGroup> subgroup(std::span<const int> ranks) const;

  /// Whether both are the same group, not merely one of the same ranks. Groups of one rank are all the same.
  bool operator==(const ProcessGroup& other) const {
    return impl_ == other.impl_ || (size() == 1 && other.size() == 1);
  }

  class Impl;
  explicit ProcessGroup(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}

 private:
  friend class Rpc;  // which needs the store
  friend class comm::PeerMemory;
  std::shared_ptr<Impl> impl_;
};

template <typename F>
auto ProcessGroup::agree_on(std::string_view step, F&& f) const {
  return agree_on_outcome(std::forward<F>(f), [&](const std::exception_ptr& failure) { agree(step, failure); });
}

}  // namespace tessera
