#pragma once
/// \file
/// Placements: how a tensor is distributed along one dimension of a device mesh.
///
/// A tensor on a mesh has one placement per mesh dimension. They apply from the first to the last: each shard splits
/// what the earlier ones left. Plain values. PyTorch: torch/distributed/tensor/placement_types.py with Shard,
/// _StridedShard, Replicate and Partial. Unlike there, a strided shard never equals a `shard` of the same dimension.

#include <cstdint>
#include <iosfwd>
#include <span>
#include <string>
#include <vector>

#include "tessera/base/reduce_op.h"

namespace tessera {

/// The placement of a tensor along one mesh dimension: replicated, sharded or partial.
class Placement {
 public:
  enum class Kind : std::uint8_t { replicate, shard, partial };

  /// Replicates the tensor: every rank has all of its elements.
  Placement() = default;
  static Placement replicate() { return {}; }
  /// Shards dimension `dim` of the tensor as torch.chunk splits it: coordinate i has chunk i. A negative `dim` counts
  /// from the end (see `normalized`).
  static Placement shard(std::int64_t dim);
  /// Splits dimension `dim` into `split_factor` parts as torch.chunk does, and each part into as many chunks as the
  /// mesh dimension is long. Coordinate i has chunk i of each part, one after another. If the ranks divide the length
  /// of `dim`, this placement followed by `shard(dim)` on a mesh dimension of length `split_factor` gives the same
  /// result as that shard applied first: this is how FSDP shards a tensor that is tensor parallel. A split_factor of 1
  /// is `shard(dim)`. Throws `Error(invalid_argument)` for a factor < 1.
  static Placement strided_shard(std::int64_t dim, std::int64_t split_factor);
  /// Returns a partial placement: every rank has a value for each element, and `op` reduces them to the tensor. If
  /// several mesh dimensions are partial, they are reduced in any order, so they must be of one kind, or sums and
  /// averages.
  static Placement partial(ReduceOp op = ReduceOp::sum);

  Kind kind() const { return kind_; }
  bool is_replicate() const { return kind_ == Kind::replicate; }
  bool is_shard() const { return kind_ == Kind::shard; }
  bool is_shard(std::int64_t dim) const { return is_shard() && dim_ == dim; }
  bool is_strided() const { return split_factor_ > 1; }
  bool is_partial() const { return kind_ == Kind::partial; }
  std::int64_t dim() const { return dim_; }                    ///< of a shard
  std::int64_t split_factor() const { return split_factor_; }  ///< of a shard; 1 if it is not strided
  ReduceOp reduce_op() const { return reduce_op_; }            ///< of a partial

  bool operator==(const Placement&) const = default;

 private:
  Kind kind_ = Kind::replicate;
  ReduceOp reduce_op_ = ReduceOp::sum;
  std::int64_t dim_ = 0, split_factor_ = 1;
};

using Placements = std::vector<Placement>;

/// Returns PyTorch's notation: "S(0)", "_S(0, 2)", "R", "P(sum)".
std::string to_string(const Placement& placement);
/// Returns "[S(0), R]".
std::string to_string(std::span<const Placement> placements);
std::ostream& operator<<(std::ostream& out, const Placement& placement);

/// Returns the placements with negative dimensions counted from the front. Throws `Error(invalid_argument)` for a
/// dimension that a tensor of `tensor_dims` dimensions does not have.
Placements normalized(std::span<const Placement> placements, std::size_t tensor_dims);

}  // namespace tessera
