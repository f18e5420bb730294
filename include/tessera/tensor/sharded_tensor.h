#pragma once
/// \file
/// A tensor that several ranks hold together: each rank has its shards and knows where all of them are.
///
/// Law: the boxes of all ranks' shards partition the tensor, and `local_shards()[i].tensor` holds the elements of
/// `local_shards()[i].metadata`'s box, on the device of its placement, with the dtype, requires_grad and pin_memory of
/// `metadata().tensor_properties`. The rank of a placement is a rank of the group.
///
/// A ShardedTensor is a reference, as an at::Tensor is: copies are the same tensor. Functions that communicate are
/// collectives of its group; those that make one from shards are, too, and what is wrong on one rank is an error on
/// all. One thread at a time. PyTorch: torch/distributed/_shard/sharded_tensor/api.py.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <iosfwd>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

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
  /// Whether `remote_shards` will know the shards of other ranks. Needs `init_rpc` before.
  bool init_rrefs = false;
};

/// Which rank of which group a ShardedTensor was on. PyTorch: ShardedTensor.ProcessGroupState.
struct ProcessGroupState {
  int rank = 0;        ///< in the group
  int world_rank = 0;  ///< in the world
  int size = 1;        ///< of the group
  int world_size = 1;  ///< of the world
  bool operator==(const ProcessGroupState&) const = default;
};

/// All that one rank has of a ShardedTensor, as plain values; the shards share their storage with it.
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

  // Each rank makes the shards that `spec` places on it; nothing is communicated. Throws Error(invalid_argument) as
  // the spec's build_metadata, for placements without a rank or with one that isn't in the group, and
  // Error(unsupported) for another layout than strided or another memory format than contiguous.
  //
  // With init_rrefs every way to make one, and `to`, `cpu`, `cuda` and `reshard`, are collectives in which the ranks
  // give each other references to their shards. What is wrong on one is an error on all, and so is
  // Error(invalid_argument) if RPC isn't initialized or the RPC rank isn't the rank in the world, and
  // Error(unsupported) for shards that are not on CPU.
  static ShardedTensor empty(SpecPtr spec, Sizes size, const ProcessGroup& group = {},
                             const ShardedTensorOptions& options = {});
  static ShardedTensor zeros(SpecPtr spec, Sizes size, const ProcessGroup& group = {},
                             const ShardedTensorOptions& options = {});
  static ShardedTensor ones(SpecPtr spec, Sizes size, const ProcessGroup& group = {},
                            const ShardedTensorOptions& options = {});
  static ShardedTensor full(SpecPtr spec, Sizes size, const at::Scalar& value, const ProcessGroup& group = {},
                            const ShardedTensorOptions& options = {});
  /// Uniform in [0, 1), and normal: from each rank's own generator.
  static ShardedTensor rand(SpecPtr spec, Sizes size, const ProcessGroup& group = {},
                            const ShardedTensorOptions& options = {});
  static ShardedTensor randn(SpecPtr spec, Sizes size, const ProcessGroup& group = {},
                             const ShardedTensorOptions& options = {});

  /// From a whole tensor that rank `src` brings, cut as `spec` says: every rank gets a copy of its part, of the
  /// tensor's dtype, requires_grad and pin_memory. What other ranks bring is not looked at. Throws
  /// `Error(invalid_argument)` on all ranks if `src` brings none, and as `empty`. PyTorch:
  /// torch.distributed._shard.shard_tensor.
  static ShardedTensor from_tensor(const at::Tensor& tensor, SpecPtr spec, const ProcessGroup& group = {}, int src = 0,
                                   bool init_rrefs = false);
  /// From the shards that the ranks have, several or none each. The spec is inferred. Throws `Error(invalid_argument)`
  /// on all ranks if on any a shard's tensor is not strided and contiguous, or not what its metadata say (rank, device,
  /// sizes), if shards differ in dtype, requires_grad, pin_memory, or `size`, on one rank or between two, if they
  /// overlap or leave something out, and if there are none at all.
  static ShardedTensor from_local_shards(std::vector<Shard> local_shards, const Sizes& size,
                                         const ProcessGroup& group = {}, bool init_rrefs = false);
  /// From one tensor on each rank, of the size that `spec` gives it. Only this rank's is checked: contiguous, and one
  /// shard of this rank, of this size; nothing is communicated.
  static ShardedTensor from_local_tensor(const at::Tensor& tensor, SpecPtr spec, Sizes size,
                                         const ProcessGroup& group = {}, bool init_rrefs = false);
  /// From metadata that all ranks have, which must be the same; nothing is communicated. The spec is inferred unless
  /// given. Throws `Error(invalid_argument)` where local shards and metadata don't fit together.
  static ShardedTensor from_local_shards_and_global_metadata(std::vector<Shard> local_shards,
                                                             ShardedTensorMetadata metadata,
                                                             const ProcessGroup& group = {}, SpecPtr spec = nullptr,
                                                             bool init_rrefs = false);

  /// What this rank has, to be made into a tensor again, here or in a process that takes this rank's place. The
  /// references of `remote_shards` are no part of it.
  ShardedTensorState state() const;
  /// The tensor of a state, on the shards of the state. A collective. Throws `Error(invalid_argument)` on all ranks if
  /// on any rank or size of group or world are not those that the state was taken with, or its local shards are not
  /// those of its metadata. PyTorch: ShardedTensor.__setstate__.
  static ShardedTensor from_state(ShardedTensorState state, const ProcessGroup& group = {});

  const ShardedTensorMetadata& metadata() const;
  const ShardingSpec& sharding_spec() const { return *shared_spec(); }
  const SpecPtr& shared_spec() const;
  const std::vector<Shard>& local_shards() const;
  /// The only shard of this rank. Throws `Error(unsupported)` if it has none or several.
  const at::Tensor& local_tensor() const;
  const ProcessGroup& process_group() const;
  const Sizes& size() const { return metadata().size; }
  at::ScalarType scalar_type() const;
  bool requires_grad() const { return metadata().tensor_properties.requires_grad; }
  bool init_rrefs() const;
  bool is_pinned() const { return metadata().tensor_properties.pin_memory; }
  /// Whether both are the same tensor, not merely equal.
  bool is_same(const ShardedTensor& other) const { return state_ == other.state_; }

  /// A tensor of the same spec, size and group whose shards are these tensors, for ops: as many as this one's local
  /// shards, of their sizes and devices, contiguous, of `dtype`, and requiring grad as said, which must be the same on
  /// all ranks. Nothing is communicated, unless this tensor knows remote shards: so does the new one then. Throws
  /// `Error(invalid_argument)` where they aren't.
  ShardedTensor with_local_tensors(const std::vector<at::Tensor>& tensors, at::ScalarType dtype,
                                   bool requires_grad) const;
  /// Throws `Error(invalid_argument)` for a dtype that can't.
  void set_requires_grad(bool requires_grad);

  /// This tensor itself if all its shards are on CPU, else a copy there. `memory_format` is preserve or contiguous
  /// (`Error(unsupported)` otherwise). With `group` the copy is of that group, which must have the same ranks: one that
  /// was on CUDA may need another backend.
  ShardedTensor cpu(at::MemoryFormat memory_format = at::MemoryFormat::Preserve,
                    const std::optional<ProcessGroup>& group = std::nullopt) const;
  /// A new tensor on each rank's current CUDA device; of shards that are there already it has the same storage.
  ShardedTensor cuda(bool non_blocking = false, at::MemoryFormat memory_format = at::MemoryFormat::Preserve,
                     const std::optional<ProcessGroup>& group = std::nullopt) const;
  struct ToOptions {
    std::optional<at::Device> device = std::nullopt;  ///< for CUDA each rank's current device, whatever its index
    std::optional<at::ScalarType> dtype = std::nullopt;
    bool copy = false, non_blocking = false;
    at::MemoryFormat memory_format = at::MemoryFormat::Preserve;
    std::optional<ProcessGroup> group = std::nullopt;
  };
  /// This tensor itself if device and dtype are what they are and no copy is asked for, else a new one, differentiable
  /// as at::Tensor::to. On another device its spec is inferred. Nothing is communicated. Throws
  /// `Error(invalid_argument)` if this tensor requires grad and the new dtype can't.
  ShardedTensor to(const ToOptions& options) const;

  /// `out` of rank `dst` becomes the whole tensor: of this size and dtype, contiguous; undefined on other ranks. Every
  /// rank sends what it holds, once.
  void gather(int dst = 0, const at::Tensor& out = {}) const;

  /// Cuts this tensor as `spec` says: between any two specs, with any number of shards on a rank. Only elements whose
  /// rank changes are sent. All ranks must give the same spec. If it is the spec that the tensor has, nothing happens.
  void reshard(SpecPtr spec);

  /// The shards of the other ranks of the group, by rank in the world, each rank's in the order of its local shards;
  /// nothing for a rank that has none. Valid until this tensor is resharded or destroyed; copies of what is in it live
  /// on. Throws `Error(invalid_argument)` if this was made without init_rrefs.
  const std::map<int, std::vector<RemoteShard>>& remote_shards() const;

 private:
  struct State;
  explicit ShardedTensor(std::shared_ptr<State> state) : state_(std::move(state)) {}
  static ShardedTensor finish(std::shared_ptr<State> state);
  static ShardedTensor make(SpecPtr spec, Sizes size, const ProcessGroup& group, const ShardedTensorOptions& options,
                            const std::function<at::Tensor(at::IntArrayRef, const at::TensorOptions&)>& create);
  std::shared_ptr<State> state_;
};

std::string to_string(const ShardedTensor& tensor);
std::ostream& operator<<(std::ostream& out, const ShardedTensor& tensor);

}  // namespace tessera
