#pragma once
/// \file
/// Remote procedure calls between the ranks of a group, over LibTorch's own (TensorPipe), and references to tensors
/// that other ranks have.
///
/// LibTorch keeps one agent for the whole process, so this is the one thing here that nobody is passed: who needs it
/// finds it. It follows that ranks are processes, not threads (`run_local`), and that RPC can be initialized once in a
/// process: LibTorch's remote references stay bound to the first agent. PyTorch: torch/distributed/rpc/api.py,
/// torch/csrc/distributed/rpc/rref_context.cpp.

#include <ATen/core/Tensor.h>
#include <ATen/core/jit_type_base.h>  // which the next header needs in LibTorch 1.13
#include <ATen/core/rref_interface.h>

#include <chrono>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tessera/comm/process_group.h"

namespace tessera {

struct RpcOptions {
  /// What this worker is called, unlike any other: 1 to 128 of A-Z a-z 0-9 _ - . Empty: "worker<RANK>".
  std::string name;
  /// How long a call may take unless it says otherwise.
  std::chrono::milliseconds timeout = std::chrono::seconds(60);
  /// That answer the calls of others.
  int threads = 16;
};

/// This rank's part in RPC. Move-only.
class Rpc {
 public:
  Rpc(const ProcessGroup& group, const RpcOptions& options);
  Rpc(Rpc&&) noexcept;
  Rpc& operator=(Rpc&&) noexcept;
  /// Leaves at once, if `shutdown` wasn't called: others that fetch from this rank get `Error(rank_failure)`.
  ~Rpc();

  /// Ends RPC on all ranks together: waits until all have come and no reference crosses ranks any more; after it a
  /// fetch is `Error(invalid_argument)`. All ranks of the group must call it; what was called before is nothing to do.
  /// If a rank has died, the others leave as ~Rpc does and throw `Error(rank_failure)` that names it.
  void shutdown();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Whether the LibTorch here was built with TensorPipe.
bool is_rpc_available();

/// Meets the other ranks of `group`, all of which must call it; a rank of the group is its RPC rank. Throws on all
/// ranks `Error(unsupported)` if in any process RPC was initialized before or LibTorch has no TensorPipe,
/// `Error(invalid_argument)` for names that can't be or that two workers have and for a timeout or threads below 1, and
/// `Error(rank_failure)` naming a rank that died.
[[nodiscard]] Rpc init_rpc(const ProcessGroup& group, const RpcOptions& options = {});

/// Whether this process has an agent, ours or another's.
bool is_rpc_initialized();
/// This process's. Throws `Error(invalid_argument)` without RPC.
int rpc_rank();
/// The RPC rank of the worker of this name, if there is one. Throws `Error(invalid_argument)` without RPC.
std::optional<int> find_rpc_worker(const std::string& name);

/// A reference to a tensor that another rank has. Law: the tensor lives as long as its owner or any reference keeps it;
/// the last copy of a reference to be destroyed tells the owner, without waiting. References of a rank that died
/// without telling are kept until the owner's RPC ends.
class RemoteTensor {
 public:
  /// Its RPC rank.
  int owner() const { return reference_->owner(); }
  /// A copy of the tensor as it is at the owner now. Blocks for up to `timeout`, that of RPC unless given. Throws
  /// `Error(rank_failure)` naming the owner if it doesn't answer, `Error(invalid_argument)` without RPC.
  at::Tensor fetch(std::optional<std::chrono::milliseconds> timeout = std::nullopt) const;

  explicit RemoteTensor(c10::intrusive_ptr<c10::RRefInterface> reference) : reference_(std::move(reference)) {}

 private:
  c10::intrusive_ptr<c10::RRefInterface> reference_;
};

/// Gives every other rank of `group` a reference to each of these tensors, as many as each rank likes. Returns, by rank
/// of the group, references to what the others gave, in their order; nothing for this rank. A collective. Throws on all
/// ranks `Error(invalid_argument)` if on any RPC isn't initialized or its rank isn't that in the world, and
/// `Error(unsupported)` for tensors that are not on CPU.
std::vector<std::vector<RemoteTensor>> share_tensors(const ProcessGroup& group, std::span<const at::Tensor> tensors);

}  // namespace tessera
