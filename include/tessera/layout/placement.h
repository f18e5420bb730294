#pragma once
/// \file
/// How a tensor lies along one dimension of a device mesh. A tensor on a mesh has a placement for each mesh dimension,
/// applied from the first to the last: each cuts what the ones before it have left.
///
/// Plain values. PyTorch: torch/distributed/tensor/placement_types.py, whose Shard, _StridedShard, Replicate and
/// Partial these are; but a strided shard is equal to itself alone, not to `shard` of its dimension.

#include <cstdint>
#include <iosfwd>
#include <span>
#include <string>
#include <vector>

#include "tessera/base/reduce_op.h"

namespace tessera {

class Placement {
 public:
  enum class Kind : std::uint8_t { replicate, shard, partial };

  /// Every rank has it.
  Placement() = default;
  static Placement replicate() { return {}; }
  /// Dimension `dim` of the tensor is cut as torch.chunk cuts it, coordinate i having the i-th chunk. `dim` counts from
  /// the end if negative (`normalized`).
  static Placement shard(std::int64_t dim);
  /// Dimension `dim` is cut into `split_factor` parts as torch.chunk cuts it, and each of these into as many chunks as
  /// the mesh dimension is long; coordinate i has the i-th chunk of each part, one behind the other. With a later
  /// `shard(dim)` on a mesh dimension of length split_factor that is as if that one had cut first: what FSDP makes of
  /// a tensor that is tensor parallel. split_factor 1 is `shard(dim)`.
  /// Throws `Error(invalid_argument)` for a factor < 1.
  static Placement strided_shard(std::int64_t dim, std::int64_t split_factor);
  /// Every rank has elements everywhere, and the tensor is what `op` makes of them. Of several mesh dimensions that are
  /// partial the first is reduced first.
  static Placement partial(ReduceOp op = ReduceOp::sum);

  Kind kind() const { return kind_; }
  bool is_replicate() const { return kind_ == Kind::replicate; }
  bool is_shard() const { return kind_ == Kind::shard; }
  bool is_shard(std::int64_t dim) const { return is_shard() && dim_ == dim; }
  bool is_strided() const { return split_factor_ > 1; }
  bool is_partial() const { return kind_ == Kind::partial; }
  std::int64_t dim() const { return dim_; }                    ///< of a shard
  std::int64_t split_factor() const { return split_factor_; }  ///< of a shard; 1 if it isn't strided
  ReduceOp reduce_op() const { return reduce_op_; }            ///< of a partial

  bool operator==(const Placement&) const = default;

 private:
  Kind kind_ = Kind::replicate;
  ReduceOp reduce_op_ = ReduceOp::sum;
  std::int64_t dim_ = 0, split_factor_ = 1;
};

using Placements = std::vector<Placement>;

/// As PyTorch prints it: "S(0)", "_S(0, 2)", "R", "P(sum)".
std::string to_string(const Placement& placement);
/// "[S(0), R]"
std::string to_string(std::span<const Placement> placements);
std::ostream& operator<<(std::ostream& out, const Placement& placement);

/// The placements with dimensions that count from the front. Throws `Error(invalid_argument)` for a dimension that a
/// tensor of `tensor_dims` dimensions hasn't.
Placements normalized(std::span<const Placement> placements, std::size_t tensor_dims);

}  // namespace tessera
