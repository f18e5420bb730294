#pragma once
/// \file
/// A tensor sharded over the ranks of a group: each rank has its own shards and the metadata of all shards.
///
/// Law: the boxes of all ranks' shards partition the tensor, and `local_shards()[i].tensor` holds the elements of
/// `local_shards()[i].metadata`'s box, on the device of its placement, with the dtype, requires_grad and pin_memory of
/// `metadata().tensor_properties`. The rank of a placement is a rank of the group.
///
/// A ShardedTensor is a reference, as at::Tensor: copies are the same tensor. Functions that communicate are
/// collectives of the group, and so is `from_local_shards`: if any rank fails, every rank throws. One thread at a time.
/// PyTorch: torch/distributed/_shard/sharded_tensor/api.py.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <iosfwd>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tessera/base/function_ref.h"
#include "tessera/comm/process_group.h"
#include "tessera/layout/shard_metadata.h"
#include "tessera/layout/sharding_spec.h"
#include "tessera/tensor/shard.h"

namespace tessera {

class RemoteShard;  // tessera/tensor/remote_shard.h

struct ShardedTensorOptions {
  at::ScalarType dtype = c10::typeMetaToScalarType(c10::get_default_dtype());
  at::Layout layout = at::kStrided;
  bool requires_grad = false;
  bool pin_memory = false;
  at::MemoryFormat memory_format = at::MemoryFormat::Contiguous;
  /// Whether to collect references to other ranks' shards for `remote_shards`. Requires a prior `init_rpc`.
  bool init_rrefs = false;
};

/// The rank that a ShardedTensor's state was taken on. PyTorch: ShardedTensor.ProcessGroupState.
struct ProcessGroupState {
  int rank = 0;        ///< in the group
  int world_rank = 0;  ///< in the world
  int size = 1;        ///< of the group
  int world_size = 1;  ///< of the world
  bool operator==(const ProcessGroupState&) const = default;
};

/// One rank's part of a ShardedTensor as plain values. The shards share storage with the tensor.
struct ShardedTensorState {
  std::vector<Shard> local_shards;
  ShardedTensorMetadata metadata;
  ProcessGroupState process_group;
  std::shared_ptr<const ShardingSpec> sharding_spec;
  bool init_rrefs = false;
};

class ShardedTensor {
 public:
  using SpecPtr = std::shared_ptr<const ShardingSpec>;
  using Sizes = std::vector<std::int64_t>;

  // Each rank creates the shards that `spec` places on it, without communication. Throws Error(invalid_argument) as the
  // spec's build_metadata does, and for placements without a rank or with a rank outside of the group. Throws
  // Error(unsupported) for layouts other than strided and memory formats other than contiguous.
  //
  // With init_rrefs, all functions that create a tensor, and `to`, `cpu`, `cuda` and `reshard`, are collectives in
  // which the ranks exchange references to their shards. If any rank fails, every rank throws. Every rank throws
  // Error(invalid_argument) if RPC is not initialized or an RPC rank differs from the rank in the world, and
  // Error(unsupported) for shards that are not on CPU.
  static ShardedTensor empty(SpecPtr spec, Sizes size, const ProcessGroup& group = {},
                             const ShardedTensorOptions& options = {});
  static ShardedTensor zeros(SpecPtr spec, Sizes size, const ProcessGroup& group = {},
                             const ShardedTensorOptions& options = {});
  static ShardedTensor ones(SpecPtr spec, Sizes size, const ProcessGroup& group = {},
                            const ShardedTensorOptions& options = {});
  static ShardedTensor full(SpecPtr spec, Sizes size, const at::Scalar& value, const ProcessGroup& group = {},
                            const ShardedTensorOptions& options = {});
  /// `rand` is uniform in [0, 1), `randn` normal. Both draw from each rank's own generator.
  static ShardedTensor rand(SpecPtr spec, Sizes size, const ProcessGroup& group = {},
                            const ShardedTensorOptions& options = {});
  static ShardedTensor randn(SpecPtr spec, Sizes size, const ProcessGroup& group = {},
                             const ShardedTensorOptions& options = {});

  /// Shards the full tensor of rank `src` by `spec`: every rank gets a copy of its shards, with the tensor's dtype,
  /// requires_grad and pin_memory. The tensors of other ranks are ignored. If `src` passes an undefined tensor, every
  /// rank throws `Error(invalid_argument)`; also throws as `empty`. PyTorch: torch.distributed._shard.shard_tensor.
  static ShardedTensor from_tensor(const at::Tensor& tensor, SpecPtr spec, const ProcessGroup& group = {}, int src = 0,
                                   bool init_rrefs = false);
  /// Creates a tensor of the ranks' shards, any number on each rank, and infers the spec. Every rank throws
  /// `Error(invalid_argument)` if there is no shard at all, if on any rank a shard's tensor is not strided and
  /// contiguous or differs from its metadata (rank, device, sizes), if shards differ in dtype, requires_grad or
  /// pin_memory or ranks in `size`, or if the shards overlap or leave gaps.
  static ShardedTensor from_local_shards(std::vector<Shard> local_shards, const Sizes& size,
                                         const ProcessGroup& group = {}, bool init_rrefs = false);
  /// Creates a tensor of one local tensor on each rank, without communication. Throws `Error(invalid_argument)` on this
  /// rank if the tensor is undefined or not contiguous, if `spec` does not give this rank one shard of its size and
  /// device, or if the shards do not partition the tensor.
  static ShardedTensor from_local_tensor(const at::Tensor& tensor, SpecPtr spec, Sizes size,
                                         const ProcessGroup& group = {}, bool init_rrefs = false);
  /// Creates a tensor of local shards and metadata, which must be the same on all ranks, without communication. The
  /// spec is inferred unless given. Throws `Error(invalid_argument)` if local shards and metadata do not match.
  static ShardedTensor from_local_shards_and_global_metadata(std::vector<Shard> local_shards,
                                                             ShardedTensorMetadata metadata,
                                                             const ProcessGroup& group = {}, SpecPtr spec = nullptr,
                                                             bool init_rrefs = false);

  /// Returns this rank's part, from which `from_state` creates the tensor again, in this process or in one that takes
  /// this rank's place. Does not include the references of `remote_shards`.
  ShardedTensorState state() const;
  /// Creates the tensor of a state; it shares the shards of the state. A collective. Every rank throws
  /// `Error(invalid_argument)` if, on any rank, the rank or size of group or world differs from that in the state, or
  /// the state's local shards do not match its metadata in number, size, dtype, device, requires_grad or pin_memory, or
  /// are not contiguous. PyTorch: ShardedTensor.__setstate__.
  static ShardedTensor from_state(ShardedTensorState state, const ProcessGroup& group = {});

  const ShardedTensorMetadata& metadata() const;
  const ShardingSpec& sharding_spec() const { return *shared_spec(); }
  const SpecPtr& shared_spec() const;
  const std::vector<Shard>& local_shards() const;
  /// Returns the only shard of this rank. Throws `Error(unsupported)` if it has none or several.
  const at::Tensor& local_tensor() const;
  const ProcessGroup& process_group() const;
  const Sizes& size() const { return metadata().size; }
  /// Returns the size of dimension `dim`; a negative one counts from the end. Throws `Error(invalid_argument)` unless
  /// -dim() <= dim < dim().
  std::int64_t size(std::int64_t dim) const;
  /// Returns the number of dimensions.
  std::int64_t dim() const { return static_cast<std::int64_t>(size().size()); }
  /// Returns the number of elements of the full tensor.
  std::int64_t numel() const;
  at::ScalarType scalar_type() const;
  /// Returns the device of this rank's first shard. On a rank without shards, returns the current CUDA device if the
  /// group's backend is NCCL, and otherwise CPU, as PyTorch does with Gloo: tensor_device in
  /// torch/distributed/_shard/sharded_tensor/_ops/tensor_ops.py.
  at::Device device() const;
  bool requires_grad() const { return metadata().tensor_properties.requires_grad; }
  bool init_rrefs() const;
  bool is_pinned() const { return metadata().tensor_properties.pin_memory; }
  /// Returns whether both refer to the same tensor.
  bool is_same(const ShardedTensor& other) const { return state_ == other.state_; }

  /// Returns a tensor of the same spec, size and group with these local tensors, for implementing ops. There must be
  /// one for each local shard, contiguous, with its size and device and with `dtype`, in pinned memory if `pin_memory`
  /// is true. The other arguments must be the same on all ranks. Throws `Error(invalid_argument)` otherwise. Nothing is
  /// communicated unless this tensor has remote shards; the result has them then, too.
  ShardedTensor with_local_tensors(const std::vector<at::Tensor>& tensors, at::ScalarType dtype, bool requires_grad,
                                   bool pin_memory = false) const;
  /// Throws `Error(invalid_argument)` if the dtype cannot require grad.
  void set_requires_grad(bool requires_grad);

  /// Copies the tensor to CPU; returns this tensor if all its shards are there. `memory_format` must be preserve or
  /// contiguous; otherwise throws `Error(unsupported)`. If `group` is given, the copy belongs to it: moving from CUDA
  /// to CPU may require another backend. It must have the same ranks.
  ShardedTensor cpu(at::MemoryFormat memory_format = at::MemoryFormat::Preserve,
                    const std::optional<ProcessGroup>& group = std::nullopt) const;
  /// Returns a new tensor on each rank's current CUDA device. Shards that are there already share their storage.
  ShardedTensor cuda(bool non_blocking = false, at::MemoryFormat memory_format = at::MemoryFormat::Preserve,
                     const std::optional<ProcessGroup>& group = std::nullopt) const;
  struct ToOptions {
    std::optional<at::Device> device = std::nullopt;  ///< for CUDA, each rank's current device; the index is ignored
    std::optional<at::ScalarType> dtype = std::nullopt;
    bool copy = false, non_blocking = false;
    at::MemoryFormat memory_format = at::MemoryFormat::Preserve;
    std::optional<ProcessGroup> group = std::nullopt;
  };
  /// Converts the tensor, differentiable as at::Tensor::to; in no-grad mode the result does not require grad. Returns
  /// this tensor if device and dtype do not change and `copy` is false. If the device changes, the spec is inferred.
  /// Nothing is communicated; so each rank notes its own device for all shards, whose indices differ between ranks then
  /// (see `comparable_text`). Throws `Error(invalid_argument)` if this tensor requires grad and the new dtype cannot.
  ShardedTensor to(const ToOptions& options) const;

  /// Gathers the shards into `out` on rank `dst`, which must have this size and be contiguous. On other ranks, `out`
  /// must be undefined. Every rank sends its shards once.
  ///
  /// If `dtype` is given, every rank converts its elements to it before it sends them, and `out` may be of any dtype,
  /// to which the received elements are converted again. Otherwise `out` must have this tensor's dtype, which PyTorch
  /// calls enforce_dtype. All ranks must call it with the same `dst` and `dtype`. Every rank throws
  /// `Error(invalid_argument)` if they differ, if any rank's `out` is wrong, and for a conversion that LibTorch does
  /// not have or that drops imaginary parts.
  void gather(int dst = 0, const at::Tensor& out = {}, std::optional<at::ScalarType> dtype = std::nullopt) const;

  /// Reshards this tensor by `spec`: from any spec to any other, with any number of shards on a rank. Sends only the
  /// elements whose rank changes. All ranks must pass the same spec. Does nothing if the tensor already has this spec.
  void reshard(SpecPtr spec);

  /// Returns the shards of the other ranks of the group, by rank in the world and in the order of that rank's local
  /// shards; ranks without shards have no entry. Valid until this tensor is resharded or destroyed; copies of the
  /// references stay valid. Throws `Error(invalid_argument)` if this tensor was created without init_rrefs.
  const std::map<int, std::vector<RemoteShard>>& remote_shards() const;

 private:
  struct State;
  explicit ShardedTensor(std::shared_ptr<State> state) : state_(std::move(state)) {}
  static ShardedTensor finish(std::shared_ptr<State> state);
  static ShardedTensor make(SpecPtr spec, Sizes size, const ProcessGroup& group, const ShardedTensorOptions& options,
                            FunctionRef<at::Tensor(at::IntArrayRef, const at::TensorOptions&)> create);
  std::shared_ptr<State> state_;
};

std::string to_string(const ShardedTensor& tensor);
std::ostream& operator<<(std::ostream& out, const ShardedTensor& tensor);

}  // namespace tessera
