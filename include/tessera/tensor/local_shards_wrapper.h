#pragma once
/// \file
/// The local part of a DTensor on a rank that has any number of shards of it, each with its offsets in the full tensor.
/// Mostly for checkpoints.
///
/// Its size is that of the concatenated shards: 2-D shards are concatenated along the second dimension (columns), 1-D
/// shards along the first; for other shards it is the size of the first one. Without shards it is [0, 0].
///
/// A reference, as at::Tensor: copies are the same wrapper, and `detach` and `requires_grad_` modify it. It supports
/// only the ops declared here and refuses every other by name (`refuse`). Only all_gather_into_tensor communicates.
/// PyTorch: torch/distributed/tensor/_shards_wrapper.py, as of 2.14.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <iosfwd>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/function_ref.h"
#include "tessera/comm/process_group.h"
#include "tessera/layout/box.h"
#include "tessera/layout/tensor_properties.h"

namespace tessera {

/// The metadata that a checkpoint records of a wrapper. Without shards there is one chunk, [0, 0) x [0, 0). PyTorch:
/// TensorStorageMetadata.
struct LocalTensorMetadata {
  TensorProperties properties;
  std::vector<std::int64_t> size;
  std::vector<Box> chunks;
  bool operator==(const LocalTensorMetadata&) const = default;
};

/// Identifies a shard of a tensor. PyTorch: MetadataIndex.
struct ShardIndex {
  std::string fqn;
  std::optional<std::vector<std::int64_t>> offset;
  std::optional<std::size_t> index;  ///< a hint: its likely position among the shards
};

/// A shard to be saved. PyTorch: WriteItem of type SHARD.
struct ShardWriteItem {
  ShardIndex index;
  Box chunk;
  TensorProperties properties;
  std::vector<std::int64_t> size;  ///< of the full tensor
};

/// The result of a collective that may still be running. PyTorch: the argument of `wait_tensor`.
class PendingTensor {
 public:
  PendingTensor(at::Tensor tensor, PendingCollective pending)
      : tensor_(std::move(tensor)), pending_(std::move(pending)) {}
  /// Blocks until the collective completes and returns the tensor. Throws as the collective. May be called again.
  at::Tensor wait() {
    pending_.wait();
    return tensor_;
  }

 private:
  at::Tensor tensor_;
  PendingCollective pending_;
};

class LocalShardsWrapper {
 public:
  /// Creates a wrapper of these shards. Throws `Error(invalid_argument)` unless there is one offset per shard, all
  /// shards are on one device and have the same number of dimensions, and each offset has this length.
  LocalShardsWrapper(std::vector<at::Tensor> local_shards, std::vector<std::vector<std::int64_t>> local_offsets);

  const std::vector<std::int64_t>& size() const;
  const std::vector<at::Tensor>& local_shards() const;
  std::vector<std::vector<std::int64_t>> local_sizes() const;
  std::vector<std::vector<std::int64_t>> local_offsets() const;
  const std::vector<Box>& local_chunks() const;
  const LocalTensorMetadata& storage_metadata() const;
  /// Returns whether the size begins with [0, 0].
  bool is_empty_shard() const;
  /// Returns the device of the shards; meta if there are none.
  at::Device device() const;
  bool is_meta() const { return device().is_meta(); }
  bool is_pinned() const;
  bool requires_grad() const;
  LocalShardsWrapper& requires_grad_(bool requires_grad = true);
  /// Returns the bytes of all shards' elements.
  std::int64_t bytes() const;
  std::string to_string() const;

  // --- ops

  /// Gathers the elements of all ranks' shards, shard by shard in row-major order, into rows as long as the second
  /// dimension of the first shard. A collective; all ranks must have the same number of elements. Throws
  /// `Error(invalid_argument)` unless there are shards, of two or more dimensions, and their elements fill the rows.
  PendingTensor all_gather_into_tensor(const ProcessGroup& group) const;
  /// Converts each shard, as at::Tensor::to.
  LocalShardsWrapper to(const at::TensorOptions& options) const;
  /// With one shard, views it as `size`, which must have as many dimensions, as at::Tensor::view. With several shards,
  /// `size` must be the current size and the shards stay as they are. Throws `Error(invalid_argument)` for another size
  /// of several shards, and `Error(unsupported)` for several shards of more than two dimensions.
  LocalShardsWrapper view(const std::vector<std::int64_t>& size) const;
  /// Returns whether the shards, their order and the metadata are equal.
  bool equal(const LocalShardsWrapper& other) const;
  /// Detaches the shards of this wrapper and returns it.
  LocalShardsWrapper& detach();
  /// Copies the shards. Throws `Error(unsupported)` for a memory format other than Preserve.
  LocalShardsWrapper clone(std::optional<at::MemoryFormat> memory_format = std::nullopt) const;
  /// Returns uninitialized shards of the same sizes. Ignores `size`, as PyTorch does.
  LocalShardsWrapper new_empty(const std::vector<std::int64_t>& size = {}) const;
  /// Pads the concatenated shards, of one dimension or two, with `value`. `pad` is as for at::constant_pad_nd: before
  /// and after the last dimension, then before and after the one before it. Along the dimension of concatenation, the
  /// first shard is padded before and the last one after; the offsets of the other shards grow by what is before.
  /// Throws `Error(invalid_argument)` without shards, and for another number of members or negative ones;
  /// `Error(unsupported)` for several shards of more dimensions. PyTorch: constant_pad_nd, in its main branch.
  LocalShardsWrapper constant_pad_nd(const std::vector<std::int64_t>& pad, const at::Scalar& value = 0) const;
  /// Throws `Error(unsupported)` naming the op: "add is not supported for LocalShardsWrapper".
  [[noreturn]] static void refuse(std::string_view op);

  // --- checkpoint protocol

  /// Returns an item for each shard of the tensor `fqn` of `size`. PyTorch: __create_write_items__.
  std::vector<ShardWriteItem> create_write_items(const std::string& fqn, const std::vector<std::int64_t>& size) const;
  /// PyTorch: __create_chunk_list__.
  const std::vector<Box>& create_chunk_list() const { return local_chunks(); }
  /// Returns the shard at position `index.index` if it has the offset, otherwise the first shard with the offset.
  /// Without shards, returns an empty tensor. Throws `Error(not_found)` if no shard has the offset. PyTorch:
  /// __get_tensor_shard__.
  at::Tensor get_tensor_shard(const ShardIndex& index) const;

 private:
  LocalShardsWrapper each(FunctionRef<at::Tensor(const at::Tensor&)> f) const;

  struct State;
  std::shared_ptr<State> state_;
};

std::ostream& operator<<(std::ostream& out, const LocalShardsWrapper& wrapper);

}  // namespace tessera
