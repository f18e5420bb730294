#include "tessera/layout/placement.h"

#include <fmt/ranges.h>

#include <ostream>

#include "tessera/base/error.h"

namespace tessera {

Placement Placement::shard(std::int64_t dim) { return strided_shard(dim, 1); }

Placement Placement::strided_shard(std::int64_t dim, std::int64_t split_factor) {
  if (split_factor < 1) {
    fail(ErrorCode::invalid_argument, "strided shard with split factor {}: expected 1 or more", split_factor);
  }
  Placement placement;
  placement.kind_ = Kind::shard;
  placement.dim_ = dim;
  placement.split_factor_ = split_factor;
  return placement;
}

Placement Placement::partial(ReduceOp op) {
  Placement placement;
  placement.kind_ = Kind::partial;
  placement.reduce_op_ = op;
  return placement;
}

std::string to_string(const Placement& placement) {
  if (placement.is_replicate()) return "R";
  if (placement.is_partial()) return fmt::format("P({})", to_string(placement.reduce_op()));
  if (placement.is_strided()) return fmt::format("_S({}, {})", placement.dim(), placement.split_factor());
  return fmt::format("S({})", placement.dim());
}

std::string to_string(std::span<const Placement> placements) {
  std::vector<std::string> texts;
  for (const Placement& placement : placements) texts.push_back(to_string(placement));
  return fmt::format("[{}]", fmt::join(texts, ", "));
}

std::ostream& operator<<(std::ostream& out, const Placement& placement) { return out << to_string(placement); }

Placements normalized(std::span<const Placement> placements, std::size_t tensor_dims) {
  const auto dims = static_cast<std::int64_t>(tensor_dims);
  Placements result(placements.begin(), placements.end());
  for (Placement& placement : result) {
    if (!placement.is_shard()) continue;
    if (placement.dim() < -dims || placement.dim() >= dims) {
      fail(ErrorCode::invalid_argument, "placement {} of a tensor of {} dimensions: expected one of its dimensions",
           to_string(placement), dims);
    }
    if (placement.dim() < 0) placement = Placement::strided_shard(placement.dim() + dims, placement.split_factor());
  }
  return result;
}

}  // namespace tessera
