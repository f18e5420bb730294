#pragma once
/// \file
/// A group of ranks that communicate: a thin value type over c10d, with collectives on flat buffers.
///
/// Every function that communicates is a collective: all ranks of the group call it, in the same order, with matching
/// arguments, from one thread at a time. It returns when its results may be used: on CPU they are complete, on CUDA the
/// current stream waits for them. Tensors must be contiguous, and not views that conjugate or negate. Collectives that
/// only move elements take every dtype, including those that the backend does not support. NCCL carries CUDA tensors,
/// and a Gloo backend next to it carries CPU tensors. The tensors of a collective are on one type of device on all
/// ranks, and need not be on the current device. Ranks are ranks of this group.
///
/// Law: a group of one rank gives the results of a group of any size, without communicating.
///
/// Errors: the ranks compare their calls before data is sent. If the arguments of any rank are invalid, or differ where
/// they must be equal, or the ranks are in different collectives, every rank throws `Error(invalid_argument)` naming
/// the ranks and the reason, and the group stays usable. If another rank dies, leaves, or does not arrive within the
/// timeout, every waiting rank throws `Error(rank_failure)` naming the collective, the ranks and the reason. After that
/// the group is broken: every later call throws the same error.
///
/// Errors name ranks by their rank in the world, also those of a subgroup.
///
/// The asynchronous variants (`start_*`), with which training steps communicate, do not compare: a rank with invalid
/// arguments throws `Error(invalid_argument)` and breaks the group for all ranks, as if it had died.
///
/// Copies refer to the same group. When the last copy is destroyed, this rank leaves the group and notifies the other
/// ranks. PyTorch: torch/distributed/distributed_c10d.py.

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
#include "tessera/base/function_ref.h"
#include "tessera/base/rank_errors.h"
#include "tessera/base/reduce_op.h"

namespace tessera {

class ProcessGroup;
namespace comm {
class SharedMemory;
class PointToPoint;
void leave_step(const ProcessGroup& group, std::string_view step, std::string_view reason) noexcept;
}  // namespace comm

/// A collective that has started and may still run. It keeps its tensors alive, even if it is never waited for: if its
/// last copy is destroyed without wait(), the CUDA stream that was current when it started waits for it. Until it has
/// ended, its inputs must not be changed and its outputs must not be used.
class PendingCollective {
 public:
  /// Creates a collective that has already ended.
  PendingCollective() = default;
  /// Blocks until the results may be used, as the blocking collective does, and throws the same errors. The pending
  /// collectives of a group may be waited for in any order. A second call does nothing.
  void wait();
  /// Returns whether wait() returns at once, because only the current stream waits, or because the collective has
  /// ended.
  bool completes_on_stream() const;

 private:
  friend class ProcessGroup;
  struct State;
  std::shared_ptr<State> state_;
};

/// The arguments of a collective that must be equal on all ranks, by name.
class CallArguments {
 public:
  template <typename T>
  CallArguments& add(std::string_view name, const T& value) {
    add_line(fmt::format("{} {}", name, value));
    return *this;
  }
  CallArguments& add_list(std::string_view name, std::span<const std::int64_t> values);
  /// Returns a line "<name> <value>" for each argument. A line break in a value becomes "; ".
  const std::string& text() const { return text_; }

 private:
  void add_line(std::string_view line);
  std::string text_;
};

/// A group of ranks, of which this process is one.
class ProcessGroup {
 public:
  /// Creates a group of this process alone.
  ProcessGroup();

  int rank() const;
  int size() const;
  /// Returns the group's name, the same on its ranks: "world", or that of the group that it was made from and a number.
  /// Errors name the group by it. PyTorch: group_name.
  const std::string& name() const;
  /// Returns "gloo", "nccl" or "mpi", or "alone" for a group of one rank, which needs no backend.
  const std::string& backend() const;
  /// Returns the world rank of each rank of this group, by rank of this group.
  const std::vector<int>& world_ranks() const;
  int world_rank() const { return world_ranks()[static_cast<std::size_t>(rank())]; }
  int world_size() const;
  /// Returns how long a rank waits for the others in a collective.
  std::chrono::milliseconds timeout() const;

  /// Copies `tensor` of `root` to `tensor` of every other rank.
  void broadcast(const at::Tensor& tensor, int root) const;
  /// Reduces `tensor` element-wise over the ranks, to the same bits on each. Takes every dtype that LibTorch can add.
  void all_reduce(const at::Tensor& tensor, ReduceOp op = ReduceOp::sum) const;
  /// Concatenates `in` of all ranks into `out`, by rank: out.numel() == size() * in.numel(), equal on all ranks.
  /// `in` may be this rank's part of `out`, and must not overlap it otherwise.
  void all_gather_into(const at::Tensor& out, const at::Tensor& in) const;
  /// Reduces `in` over the ranks and stores this rank's part in `out`: in.numel() == size() * out.numel(), equal on all
  /// ranks. `out` may be this rank's part of `in`, and must not overlap it otherwise.
  void reduce_scatter_into(const at::Tensor& out, const at::Tensor& in, ReduceOp op = ReduceOp::sum) const;
  /// Sends the next in_splits[r] elements of `in` to rank r; the next out_splits[r] elements of `out` come from rank r.
  /// Splits add up to the numel of their tensor, and in_splits[s] on rank r equals out_splits[r] on rank s. `out` and
  /// `in` must not overlap.
  void all_to_all(const at::Tensor& out, const at::Tensor& in, std::span<const std::int64_t> out_splits,
                  std::span<const std::int64_t> in_splits) const;
  /// Asynchronous variants. They return before the collective has ended, and other collectives may start before it is
  /// waited for. Local work, such as a sum that the backend does not support, is done in `wait`. PyTorch:
  /// `async_op=True`.
  PendingCollective start_all_reduce(const at::Tensor& tensor, ReduceOp op = ReduceOp::sum) const;
  PendingCollective start_all_gather_into(const at::Tensor& out, const at::Tensor& in) const;
  PendingCollective start_reduce_scatter_into(const at::Tensor& out, const at::Tensor& in,
                                              ReduceOp op = ReduceOp::sum) const;
  PendingCollective start_all_to_all(const at::Tensor& out, const at::Tensor& in,
                                     std::span<const std::int64_t> out_splits,
                                     std::span<const std::int64_t> in_splits) const;
  /// Concatenates `in` of all ranks into `out` on `root`, by rank. Other ranks pass an undefined `out` (at::Tensor()).
  void gather(const at::Tensor& out, const at::Tensor& in, int root) const;
  /// Stores this rank's part of `in` of `root` in `out`. Other ranks pass an undefined `in`.
  void scatter(const at::Tensor& out, const at::Tensor& in, int root) const;
  /// Blocks until all ranks have called it. `timeout` must be positive; by default it is that of the group. Another
  /// timeout breaks the group, as invalid arguments of an asynchronous variant do.
  void barrier(std::optional<std::chrono::milliseconds> timeout = std::nullopt) const;

  /// Returns the payloads of all ranks, by rank. Payloads are bytes; their sizes may differ per rank, here and below.
  std::vector<Bytes> all_gather_bytes(ByteView bytes) const;
  /// Returns the payloads on `root`, and an empty list on other ranks.
  std::vector<Bytes> gather_bytes(ByteView bytes, int root) const;
  /// Returns the payload of `root`. Other ranks' payloads are ignored.
  Bytes broadcast_bytes(ByteView bytes, int root) const;
  /// Sends parts[r] of `root` to rank r. Other ranks' parts are ignored.
  Bytes scatter_bytes(std::span<const Bytes> parts, int root) const;
  /// Sends parts[r] to rank r. Returns the payload that each rank sent to this one.
  std::vector<Bytes> all_to_all_bytes(std::span<const Bytes> parts) const;

  /// Compares the calls of a collective that is made of others, before they are started. Each rank runs `check`, which
  /// throws if this rank's arguments are invalid and adds those that must be equal on all ranks. If `check` throws on
  /// any rank, or an argument or `operation` differs, every rank throws an `Error` naming the ranks and the reason, and
  /// the group stays usable. Costs one all-gather of 24 bytes. On a group of one rank, only runs `check`.
  void check_call(std::string_view operation, FunctionRef<void(CallArguments&)> check) const;
  /// Agrees on the outcome of `step`. Each rank passes its exception, or null if it succeeded. If any rank failed,
  /// every rank throws an `Error` naming the step, the ranks that failed and the reasons. Its code is the one that all
  /// failures share, else rank_failure. Costs as much as `check_call`.
  void agree(std::string_view step, const std::exception_ptr& failure) const;
  /// Runs `f`, agrees on its outcome, and returns its result.
  template <typename F>
  auto agree_on(std::string_view step, F&& f) const;

  /// Returns the group of the given ranks of this group, in this order, or nothing on ranks that are not in it. All
  /// ranks of this group must call it with the same list. A collective. Throws `Error(invalid_argument)` for ranks that
  /// do not exist or are listed twice. From a broken group, a rank can only make a group of itself.
  std::optional<ProcessGroup> subgroup(std::span<const int> ranks) const;

  /// Compares identity: two groups of the same ranks are not equal. All groups of one rank are equal.
  bool operator==(const ProcessGroup& other) const {
    return impl_ == other.impl_ || (size() == 1 && other.size() == 1);
  }

  class Impl;
  explicit ProcessGroup(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}

 private:
  friend class CommDebugMode;
  friend class Rpc;  // needs the store
  friend class comm::SharedMemory;
  friend class comm::PointToPoint;
  friend void comm::leave_step(const ProcessGroup& group, std::string_view step, std::string_view reason) noexcept;
  std::shared_ptr<Impl> impl_;
};

template <typename F>
auto ProcessGroup::agree_on(std::string_view step, F&& f) const {
  return agree_on_outcome(std::forward<F>(f), [&](const std::exception_ptr& failure) { agree(step, failure); });
}

}  // namespace tessera
