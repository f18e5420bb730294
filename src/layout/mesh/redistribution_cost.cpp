#include "tessera/layout/redistribution_cost.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "tessera/base/error.h"

namespace tessera {

namespace {

using Lengths = std::span<const std::int64_t>;

// A mesh dimension that splits a tensor dimension.
struct DimSplit {
  std::size_t mesh_dim = 0;
  std::int64_t factor = 1;  // of a strided shard that only splits parts of others into more parts; otherwise 1
  bool operator==(const DimSplit&) const = default;
};

// Returns the mesh dimensions that split tensor dimension `dim`, the first one first. A strided shard comes after those
// whose ranks make up its factor (see shard_order.h).
std::vector<DimSplit> splits_of(const Placements& placements, Lengths mesh_shape, std::int64_t dim) {
  std::vector<DimSplit> splits;
  for (std::size_t m = placements.size(); m-- > 0;) {
    if (!placements[m].is_shard(dim) || mesh_shape[m] == 1) continue;
    std::size_t place = 0;
    std::int64_t parts = 1;
    while (place < splits.size() && parts < placements[m].split_factor()) parts *= mesh_shape[splits[place++].mesh_dim];
    const bool fits = parts == placements[m].split_factor();
    const DimSplit split{m, fits ? 1 : placements[m].split_factor()};
    splits.insert(splits.begin() + static_cast<std::ptrdiff_t>(fits ? place : 0), split);
  }
  return splits;
}

std::int64_t part_count(std::span<const DimSplit> splits, Lengths mesh_shape) {
  std::int64_t parts = 1;
  for (const DimSplit& split : splits) parts *= mesh_shape[split.mesh_dim];
  return parts;
}

// Returns which part a rank has.
std::int64_t part_at(std::span<const DimSplit> splits, Lengths mesh_shape, std::span<const std::int64_t> coordinate) {
  std::int64_t part = 0;
  for (const DimSplit& split : splits) part = part * mesh_shape[split.mesh_dim] + coordinate[split.mesh_dim];
  return part;
}

bool shares_mesh_dims(std::span<const DimSplit> a, std::span<const DimSplit> b) {
  return std::any_of(a.begin(), a.end(), [&](const DimSplit& split) {
    return std::any_of(b.begin(), b.end(), [&](const DimSplit& other) { return other.mesh_dim == split.mesh_dim; });
  });
}

// What splits a tensor dimension before and after, without what both begin with.
struct SplitChange {
  std::vector<DimSplit> before, after;
  std::int64_t before_parts = 1, after_parts = 1;

  SplitChange(std::vector<DimSplit> a, std::vector<DimSplit> b, Lengths mesh_shape) {
    std::size_t common = 0;
    while (common < a.size() && common < b.size() && a[common] == b[common]) ++common;
    before.assign(a.begin() + static_cast<std::ptrdiff_t>(common), a.end());
    after.assign(b.begin() + static_cast<std::ptrdiff_t>(common), b.end());
    before_parts = part_count(before, mesh_shape);
    after_parts = part_count(after, mesh_shape);
  }
  // Whether the part that a rank has before of its part after depends on the rank.
  bool depends_on_rank() const {
    const auto is_spread = [](const DimSplit& split) { return split.factor > 1; };
    return !before.empty() && !after.empty() && std::none_of(before.begin(), before.end(), is_spread) &&
           std::none_of(after.begin(), after.end(), is_spread);
  }
  // Returns the fraction of its part after that a rank has before.
  double kept_at(Lengths mesh_shape, std::span<const std::int64_t> coordinate) const {
    const std::int64_t i = part_at(before, mesh_shape, coordinate), j = part_at(after, mesh_shape, coordinate);
    const std::int64_t shared =
        std::min((i + 1) * after_parts, (j + 1) * before_parts) - std::max(i * after_parts, j * before_parts);
    return static_cast<double>(std::max(shared, std::int64_t{0})) / static_cast<double>(before_parts);
  }
};

// Returns the fraction of its elements after that a rank has before, on average over the ranks.
double kept(const std::vector<SplitChange>& changes, Lengths mesh_shape) {
  double same = 1;  // on all ranks
  std::vector<const SplitChange*> others;
  for (const SplitChange& change : changes) {
    if (change.depends_on_rank()) {
      others.push_back(&change);
    } else {
      same /= static_cast<double>(change.before_parts);
    }
  }
  if (others.empty()) return same;
  if (others.size() == 1 && !shares_mesh_dims(others[0]->before, others[0]->after))
    return same / static_cast<double>(others[0]->before_parts);
  // Visit the ranks.
  std::vector<std::int64_t> lengths(mesh_shape.size(), 1), coordinate(mesh_shape.size(), 0);
  for (const SplitChange* change : others) {
    for (const auto* splits : {&change->before, &change->after}) {
      for (const DimSplit& split : *splits) lengths[split.mesh_dim] = mesh_shape[split.mesh_dim];
    }
  }
  double sum = 0;
  std::int64_t ranks = 0;
  for (;;) {
    double here = same;
    for (const SplitChange* change : others) here *= change->kept_at(mesh_shape, coordinate);
    sum += here;
    ++ranks;
    std::size_t m = 0;
    for (; m < lengths.size() && ++coordinate[m] == lengths[m]; ++m) coordinate[m] = 0;
    if (m == lengths.size()) return sum / static_cast<double>(ranks);
  }
}

// Returns whether a mesh dimension after `m` shards `dim`.
bool is_split_after(const Placements& placements, std::size_t m, std::int64_t dim) {
  return std::any_of(placements.begin() + static_cast<std::ptrdiff_t>(m) + 1, placements.end(),
                     [dim](const Placement& placement) { return placement.is_shard(dim); });
}

// Tries what plan_redistribution tries.
class CostSearch {
 public:
  CostSearch(Lengths size, Lengths mesh_shape, const Placements& from, Placements to)
      : size_(size), mesh_shape_(mesh_shape), to_(std::move(to)) {
    reduce_from(0, from, {});
  }
  const RedistributionCost& best() const { return best_; }

 private:
  void reduce_from(std::size_t m, Placements now, RedistributionCost cost) {
    for (; m < now.size() && (!now[m].is_partial() || now[m] == to_[m] || mesh_shape_[m] == 1); ++m) {
      if (mesh_shape_[m] == 1) now[m] = to_[m];
    }
    if (m == now.size()) {
      finish(now, cost);
      return;
    }
    const auto ranks = static_cast<double>(mesh_shape_[m]);
    const double sent = held(now) * (ranks - 1) / ranks;
    cost.collectives += 1;
    now[m] = Placement::replicate();
    reduce_from(m + 1, now, {cost.collectives, cost.elements + 2 * sent});
    for (std::size_t d = 0; d < size_.size(); ++d) {
      now[m] = Placement::shard(static_cast<std::int64_t>(d));
      if (!is_split_after(now, m, now[m].dim())) reduce_from(m + 1, now, {cost.collectives, cost.elements + sent});
    }
  }

  // Returns the elements of a rank.
  double held(const Placements& placements) const {
    double count = 1;
    for (const std::int64_t length : size_) count *= static_cast<double>(length);
    for (std::size_t m = 0; m < placements.size(); ++m) {
      if (placements[m].is_shard()) count /= static_cast<double>(mesh_shape_[m]);
    }
    return count;
  }

  void finish(const Placements& reduced, RedistributionCost cost) {
    std::vector<SplitChange> changes;
    for (std::size_t d = 0; d < size_.size(); ++d) {
      const auto dim = static_cast<std::int64_t>(d);
      changes.emplace_back(splits_of(reduced, mesh_shape_, dim), splits_of(to_, mesh_shape_, dim), mesh_shape_);
    }
    const double has = kept(changes, mesh_shape_);
    const double lacks = held(to_) * (1 - has);
    if (1 - has > 1e-9) cost += {1, lacks};
    if (!found_ || cost.total() < best_.total()) best_ = cost;
    found_ = true;
  }

  Lengths size_, mesh_shape_;
  Placements to_;
  RedistributionCost best_;
  bool found_ = false;
};

}  // namespace

RedistributionCost estimated_cost(Lengths size, Lengths mesh_shape, const Placements& from, const Placements& to) {
  if (from == to || std::find(size.begin(), size.end(), 0) != size.end()) return {};
  // As in a plan: dimensions become partial last, from what they are or from replicated ones.
  Placements moved = to;
  for (std::size_t m = moved.size(); m-- > 0;) {
    if (!moved[m].is_partial() || moved[m] == from[m]) continue;
    const bool stays = from[m].is_shard() && !is_split_after(to, m, from[m].dim());
    moved[m] = stays ? from[m] : Placement::replicate();
  }
  if (from == moved) return {};
  return CostSearch(size, mesh_shape, from, std::move(moved)).best();
}

RedistributionCost estimated_cost(const MeshLayout& from, const MeshLayout& to) {
  if (from.size() != to.size() || from.mesh_shape() != to.mesh_shape()) {
    fail(
        ErrorCode::invalid_argument,
        "cost of redistributing a tensor of shape {} on a mesh of shape {}: the target has shape {} on a mesh of shape "
        "{}, expected the same",
        shape_to_string(from.size()), shape_to_string(from.mesh_shape()), shape_to_string(to.size()),
        shape_to_string(to.mesh_shape()));
  }
  return estimated_cost(from.size(), from.mesh_shape(), from.placements(), to.placements());
}

}  // namespace tessera
