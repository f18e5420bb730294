#pragma once
/// \file
/// The layout of FSDP's flat parameter, and of each rank's shard of it.
///
/// The unsharded flat parameter is one-dimensional. It holds the elements of every parameter in the order of the
/// parameter's memory, one parameter after another, with padding for alignment. It is sharded as torch.chunk splits it,
/// and each rank's shard is padded to the size of the first.
///
/// Laws: the pieces of a parameter on all ranks partition it; a shard is its pieces in order, with only padding between
/// them; all shards have `sharded_numel()` elements. PyTorch: torch/distributed/fsdp/_flat_param.py; all numbers here
/// equal PyTorch's.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tessera/layout/box.h"

namespace tessera {

/// The name and shape of a parameter to place in a flat parameter.
struct FlatParamInput {
  std::string fqn;  ///< "layers.0.weight"
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> strides;  ///< in elements; empty means row-major
  /// Names with equal identity are one parameter. Its elements are stored once, under the first of these names. Empty:
  /// the parameter is not shared.
  std::optional<std::uint64_t> identity;
};

/// A parameter in a flat parameter.
struct ParamInfo {
  std::string fqn;
  std::vector<std::int64_t> shape, strides;
  bool contiguous = true;  ///< row-major, PyTorch's `contiguous()`
  std::int64_t numel = 0;
  std::int64_t offset = 0;  ///< of its first element in the unsharded flat parameter
  bool operator==(const ParamInfo&) const = default;
};

/// Another name of a parameter.
struct SharedParamInfo {
  std::string fqn;
  std::size_t primary = 0;  ///< index of the parameter
  bool operator==(const SharedParamInfo&) const = default;
};

/// The part of a parameter in a rank's shard. PyTorch: _ShardParamInfo.
struct ShardParamInfo {
  std::int64_t offset_in_shard = 0, numel_in_shard = 0;
  std::int64_t intra_param_start_idx = 0, intra_param_end_idx = 0;  ///< its first and last element, both inclusive
  bool operator==(const ShardParamInfo&) const = default;
};

/// The parameters of which a rank has a part. PyTorch: FlatParamShardMetadata.
struct FlatParamShardMetadata {
  std::vector<std::string> param_names;
  std::vector<std::vector<std::int64_t>> param_shapes, param_strides;
  std::vector<bool> param_contiguities;
  std::vector<std::int64_t> param_numels;
  std::vector<std::pair<std::int64_t, std::int64_t>> param_offsets;  ///< first and last element of each part, inclusive
  bool operator==(const FlatParamShardMetadata&) const = default;
};

/// A box of a parameter inside a rank's shard.
struct FlatParamPiece {
  Box box;                            ///< in the parameter's coordinates
  std::int64_t offset_in_shard = 0;   ///< of its first element
  std::vector<std::int64_t> strides;  ///< of its elements in the shard
  bool operator==(const FlatParamPiece&) const = default;
};

/// The layout of a flat parameter. Immutable except for the names.
class FlatParamLayout {
 public:
  struct Options {
    std::int64_t world_size = 1;
    /// Each parameter begins at a multiple of this many elements, and the flat parameter is padded to a multiple of the
    /// world size. 0: no padding, as PyTorch without use_orig_params.
    std::int64_t aligned_numel = 0;
  };

  /// Returns PyTorch's alignment, 16 bytes, in elements.
  static std::int64_t aligned_numel_of(std::int64_t element_bytes) { return 16 / element_bytes; }

  /// Throws `Error(invalid_argument)` for an empty list, a parameter whose strides leave gaps or overlap, duplicate
  /// names, names with equal identity but different shapes, a negative alignment, and a world size below 1. Throws
  /// `Error(corrupt)` for a negative size and for more elements than an int64 can count.
  FlatParamLayout(std::vector<FlatParamInput> params, const Options& options);

  /// Adds `prefix` to the names of all parameters.
  void add_prefix(const std::string& prefix);

  const std::vector<ParamInfo>& params() const { return params_; }
  const std::vector<SharedParamInfo>& shared_params() const { return shared_params_; }
  std::int64_t world_size() const { return world_size_; }

  /// Return the elements of each parameter and of the padding between them, in order (PyTorch: `_numels_with_padding`),
  /// and whether each entry is padding.
  const std::vector<std::int64_t>& numels_with_padding() const { return numels_with_padding_; }
  const std::vector<bool>& is_padding() const { return is_padding_; }

  /// Returns the number of elements with the padding for alignment, without the padding of the last shards.
  std::int64_t unpadded_unsharded_numel() const { return unpadded_unsharded_numel_; }
  /// Returns sharded_numel() * world_size().
  std::int64_t padded_unsharded_numel() const { return sharded_numel_ * world_size_; }
  /// Returns the number of elements of a shard, equal on all ranks.
  std::int64_t sharded_numel() const { return sharded_numel_; }
  /// Returns how many elements at the end of a rank's shard are past the end of the unsharded flat parameter.
  std::int64_t shard_numel_padded(std::int64_t rank) const;

  /// Returns the part of parameter `i` in a rank's shard, or nothing if there is none. O(1).
  std::optional<ShardParamInfo> shard_param_info(std::int64_t rank, std::size_t i) const;
  FlatParamShardMetadata shard_metadata(std::int64_t rank) const;
  /// Returns the part of parameter `i` in a rank's shard as boxes, in the order of the shard.
  std::vector<FlatParamPiece> pieces(std::int64_t rank, std::size_t i) const;

 private:
  void add(FlatParamInput param);
  void pad_to_multiple_of(std::int64_t numel);
  void check_rank(std::int64_t rank) const;

  std::int64_t world_size_;
  std::vector<ParamInfo> params_;
  std::vector<SharedParamInfo> shared_params_;
  std::vector<std::int64_t> numels_with_padding_;
  std::vector<bool> is_padding_;
  std::int64_t unpadded_unsharded_numel_ = 0, sharded_numel_ = 0;
};

}  // namespace tessera
