#pragma once
/// \file
/// Remote procedure calls between the ranks of a group, over LibTorch's RPC (TensorPipe), and references to tensors of
/// other ranks.
///
/// LibTorch has one RPC agent per process, so RPC is global state, unlike the rest of this module. Therefore ranks must
/// be processes, not threads (`run_local`), and RPC can be initialized only once in a process: LibTorch's remote
/// references stay bound to the first agent. PyTorch: torch/distributed/rpc/api.py,
/// torch/csrc/distributed/rpc/rref_context.cpp.
///
/// Workers that share the memory of one host open no port (TESSERA_HOST_MEMORY=0 turns that off). Others listen at TCP
/// ports that the kernel chooses, and TensorPipe ends the process if one receives bytes that it does not expect, even
/// from a TensorPipe of another job. Therefore only the hosts of the group may reach them.
///
/// TensorPipe polls shared memory, in PyTorch too: a worker without a port takes a processor until `shutdown`, even if
/// it is idle.

#include <ATen/core/Tensor.h>
#include <ATen/core/jit_type_base.h>  // required by the next header in LibTorch 1.13
#include <ATen/core/rref_interface.h>

#include <chrono>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tessera/comm/process_group.h"

namespace tessera {

/// Options of RPC on this rank.
struct RpcOptions {
  /// The unique name of this worker: 1 to 128 of A-Z a-z 0-9 _ and -. Empty: "worker<RANK>".
  std::string name;
  /// The default timeout of a call. LibTorch permits 24 days at most; a longer timeout is taken for 24 days.
  std::chrono::milliseconds timeout = std::chrono::seconds(60);
  /// The number of threads that answer the calls of others.
  int threads = 16;
};

/// RPC on this rank. Move-only.
class Rpc {
 public:
  Rpc(const ProcessGroup& group, const RpcOptions& options);
  Rpc(Rpc&&) noexcept;
  Rpc& operator=(Rpc&&) noexcept;
  /// Leaves at once if `shutdown` was not called: other ranks that fetch from this one get `Error(rank_failure)`.
  ~Rpc();

  /// Ends RPC on all ranks together. All ranks of the group must call it; repeated calls are no-ops. Blocks until all
  /// ranks have called it and no rank holds a reference to a tensor of another rank. Afterwards a fetch throws
  /// `Error(invalid_argument)`. If a rank has died, the others leave as ~Rpc does and throw `Error(rank_failure)`
  /// naming it.
  void shutdown();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Returns whether the LibTorch in use was built with TensorPipe.
bool is_rpc_available();

/// Initializes RPC with the other ranks of `group`, all of which must call it. A rank's RPC rank is its rank in the
/// group. Throws on all ranks: `Error(unsupported)` if RPC was initialized before in any process or LibTorch has no
/// TensorPipe; `Error(invalid_argument)` for invalid or duplicate names, a timeout that is not positive, or fewer than
/// one thread; and `Error(rank_failure)` naming a rank that died.
[[nodiscard]] Rpc init_rpc(const ProcessGroup& group, const RpcOptions& options = {});

/// Returns whether this process has an agent, created by this library or by others.
bool is_rpc_initialized();
/// Returns the RPC rank of this process. Throws `Error(invalid_argument)` without RPC.
int rpc_rank();
/// Returns the RPC rank of the worker called `name`, or nothing if there is none. Throws `Error(invalid_argument)`
/// without RPC.
std::optional<int> find_rpc_worker(const std::string& name);

/// A reference to a tensor of another rank. Law: the tensor lives as long as its owner or any reference keeps it.
/// Destroying the last copy of a reference notifies the owner, without blocking. References held by a rank that died
/// without notifying are kept until RPC ends on the owner.
class RemoteTensor {
 public:
  /// Returns the RPC rank of the owner.
  int owner() const { return reference_->owner(); }
  /// Returns a copy of the tensor in its current state on the owner. Blocks for up to `timeout`, which defaults to that
  /// of RPC. Throws `Error(rank_failure)` naming the owner if it does not answer, and `Error(invalid_argument)` without
  /// RPC or if the timeout is not positive.
  at::Tensor fetch(std::optional<std::chrono::milliseconds> timeout = std::nullopt) const;

  explicit RemoteTensor(c10::intrusive_ptr<c10::RRefInterface> reference) : reference_(std::move(reference)) {}

 private:
  c10::intrusive_ptr<c10::RRefInterface> reference_;
};

/// Gives every other rank of `group` a reference to each of `tensors`; their number may differ per rank. Returns, by
/// rank of the group, references to the tensors of each rank in its order; none for this rank. A collective. Throws on
/// all ranks: `Error(invalid_argument)` if RPC is not initialized on a rank or a rank's RPC rank is not its world rank,
/// and `Error(unsupported)` for tensors that are not on CPU.
std::vector<std::vector<RemoteTensor>> share_tensors(const ProcessGroup& group, std::span<const at::Tensor> tensors);

}  // namespace tessera
