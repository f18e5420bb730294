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
#include <iosfwd>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tessera/comm/process_group.h"
#include "tessera/layout/shard_metadata.h"
#include "tessera/layout/sharding_spec.h"

namespace tessera {

struct Shard {
  at::Tensor tensor;
  ShardMetadata metadata;

  /// A shard of this rank: the tensor's sizes at `offsets`, on its device. Throws `Error(invalid_argument)` for another
  /// number of offsets than dimensions.
  static Shard from_tensor_and_offsets(const at::Tensor& tensor, std::vector<std::int64_t> offsets, int rank);
};

struct ShardedTensorOptions {
  at::ScalarType dtype = c10::typeMetaToScalarType(c10::get_default_dtype());
  at::Layout layout = at::kStrided;
  bool requires_grad = false;
  bool pin_memory = false;
  at::MemoryFormat memory_format = at::MemoryFormat::Contiguous;
};

class ShardedTensor {
 public:
  using SpecPtr = std::shared_ptr<const ShardingSpec>;
  using Sizes = std::vector<std::int64_t>;

  // Each rank makes the shards that `spec` places on it; nothing is communicated. Throws Error(invalid_argument) as
  // the spec's build_metadata, for placements without a rank or with one that isn't in the group, and
  // Error(unsupported) for another layout than strided or another memory format than contiguous.
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

  /// From the shards that the ranks have, several or none each. The spec is inferred. Throws `Error(invalid_argument)`
  /// on all ranks if on any a shard's tensor is not strided and contiguous, or not what its metadata say (rank, device,
  /// sizes), if shards differ in dtype, requires_grad, pin_memory, or `size`, on one rank or between two, if they
  /// overlap or leave something out, and if there are none at all.
  static ShardedTensor from_local_shards(std::vector<Shard> local_shards, const Sizes& size,
                                         const ProcessGroup& group = {});
  /// From one tensor on each rank, of the size that `spec` gives it. Only this rank's is checked: contiguous, and one
  /// shard of this rank, of this size; nothing is communicated.
  static ShardedTensor from_local_tensor(const at::Tensor& tensor, SpecPtr spec, Sizes size,
                                         const ProcessGroup& group = {});
  /// From metadata that all ranks have, which must be the same; nothing is communicated. The spec is inferred unless
  /// given. Throws `Error(invalid_argument)` where local shards and metadata don't fit together.
  static ShardedTensor from_local_shards_and_global_metadata(std::vector<Shard> local_shards,
                                                             ShardedTensorMetadata metadata,
                                                             const ProcessGroup& group = {}, SpecPtr spec = nullptr);

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
  bool is_pinned() const { return metadata().tensor_properties.pin_memory; }
  /// Whether both are the same tensor, not merely equal.
  bool is_same(const ShardedTensor& other) const { return state_ == other.state_; }

  /// A tensor of the same spec, size and group whose shards are these tensors, for ops: as many as this one's local
  /// shards, of their sizes and devices, contiguous, of `dtype`, and requiring grad as said, which must be the same on
  /// all ranks. Nothing is communicated. Throws `Error(invalid_argument)` where they aren't.
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

 private:
  struct State;
  explicit ShardedTensor(std::shared_ptr<State> state) : state_(std::move(state)) {}
  static ShardedTensor make(SpecPtr spec, Sizes size, const ProcessGroup& group, const ShardedTensorOptions& options,
                            at::Tensor (*create)(at::IntArrayRef size, const at::TensorOptions& options));
  std::shared_ptr<State> state_;
};

std::string to_string(const ShardedTensor& tensor);
std::ostream& operator<<(std::ostream& out, const ShardedTensor& tensor);

}  // namespace tessera
