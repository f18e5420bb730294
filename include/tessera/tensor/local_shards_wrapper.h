#pragma once
/// \file
/// The local part of a DTensor on a rank that has several pieces of it, or none: tensors, each with its offsets in the
/// whole tensor. Largely for checkpoints.
///
/// Its own size is what the pieces would be one beside the other: of two dimensions along the second (columns), of one
/// along the first; otherwise that of the first piece. Without pieces it is [0, 0].
///
/// A reference, as an at::Tensor is: copies are the same wrapper, and `detach` and `requires_grad_` change it. The ops
/// are those that are here; any other is refused by name (`refuse`). Nothing communicates but all_gather_into_tensor.
/// PyTorch: torch/distributed/tensor/_shards_wrapper.py, as of 2.14.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <iosfwd>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/comm/process_group.h"
#include "tessera/layout/box.h"
#include "tessera/layout/tensor_properties.h"

namespace tessera {

/// PyTorch: TensorStorageMetadata. Without pieces there is one chunk, [0, 0) x [0, 0).
struct LocalTensorMetadata {
  TensorProperties properties;
  std::vector<std::int64_t> size;
  std::vector<Box> chunks;
  bool operator==(const LocalTensorMetadata&) const = default;
};

/// Which piece of which tensor. PyTorch: MetadataIndex.
struct ShardIndex {
  std::string fqn;
  std::optional<std::vector<std::int64_t>> offset;
  std::optional<std::size_t> index;  ///< among the pieces, where it is likely
};

/// A piece to be saved. PyTorch: WriteItem, of type SHARD.
struct ShardWriteItem {
  ShardIndex index;
  Box chunk;
  TensorProperties properties;
  std::vector<std::int64_t> size;  ///< of the whole tensor
};

/// A tensor that a collective is writing. PyTorch: what `wait_tensor` takes.
class PendingTensor {
 public:
  PendingTensor(at::Tensor tensor, PendingCollective pending)
      : tensor_(std::move(tensor)), pending_(std::move(pending)) {}
  /// Returns when it is there; throws as the collective. May be called again.
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
  /// Throws `Error(invalid_argument)` unless there are as many offsets as shards, all shards are on one device and have
  /// as many dimensions as the first, and each offset as many members.
  LocalShardsWrapper(std::vector<at::Tensor> local_shards, std::vector<std::vector<std::int64_t>> local_offsets);

  const std::vector<std::int64_t>& size() const;
  const std::vector<at::Tensor>& local_shards() const;
  std::vector<std::vector<std::int64_t>> local_sizes() const;
  std::vector<std::vector<std::int64_t>> local_offsets() const;
  const std::vector<Box>& local_chunks() const;
  const LocalTensorMetadata& storage_metadata() const;
  /// Whether its size begins with [0, 0].
  bool is_empty_shard() const;
  /// Of the pieces; meta without any.
  at::Device device() const;
  bool is_meta() const { return device().is_meta(); }
  bool is_pinned() const;
  bool requires_grad() const;
  LocalShardsWrapper& requires_grad_(bool requires_grad = true);
  /// Of the elements of all pieces.
  std::int64_t bytes() const;
  std::string to_string() const;

  // --- ops

  /// All ranks' pieces, in rows as long as the first piece's second dimension: each piece's elements in their order,
  /// piece by piece. A collective: all ranks have as many elements. Throws `Error(invalid_argument)` unless there are
  /// pieces, of two or more dimensions, and where the elements make no whole rows.
  PendingTensor all_gather_into_tensor(const ProcessGroup& group) const;
  /// Each piece, as at::Tensor::to.
  LocalShardsWrapper to(const at::TensorOptions& options) const;
  /// With several pieces the size it has already, and each stays as it is; with one, as at::Tensor::view to as many
  /// dimensions. Throws `Error(invalid_argument)` for another size of several, `Error(unsupported)` for several of more
  /// than two dimensions.
  LocalShardsWrapper view(const std::vector<std::int64_t>& size) const;
  /// Whether pieces, their order and the metadata are equal.
  bool equal(const LocalShardsWrapper& other) const;
  /// This wrapper itself, whose pieces are detached from then on.
  LocalShardsWrapper& detach();
  /// Throws `Error(unsupported)` for a memory format other than Preserve.
  LocalShardsWrapper clone(std::optional<at::MemoryFormat> memory_format = std::nullopt) const;
  /// Pieces of the same sizes. `size` is not looked at, as PyTorch doesn't.
  LocalShardsWrapper new_empty(const std::vector<std::int64_t>& size = {}) const;
  /// Throws `Error(unsupported)`: "add is not supported for LocalShardsWrapper".
  [[noreturn]] static void refuse(std::string_view op);

  // --- checkpoint protocol

  /// An item for each piece, of the tensor `fqn` of `size`. PyTorch: __create_write_items__.
  std::vector<ShardWriteItem> create_write_items(const std::string& fqn, const std::vector<std::int64_t>& size) const;
  /// PyTorch: __create_chunk_list__.
  const std::vector<Box>& create_chunk_list() const { return local_chunks(); }
  /// The piece at `index.index` if that has the offset, else the first with the offset, else an empty tensor if there
  /// are no pieces. Throws `Error(not_found)` otherwise. PyTorch: __get_tensor_shard__.
  at::Tensor get_tensor_shard(const ShardIndex& index) const;

 private:
  LocalShardsWrapper each(const std::function<at::Tensor(const at::Tensor&)>& f) const;

  struct State;
  std::shared_ptr<State> state_;
};

std::ostream& operator<<(std::ostream& out, const LocalShardsWrapper& wrapper);

}  // namespace tessera
