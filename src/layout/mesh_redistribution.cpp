#include "tessera/layout/mesh_redistribution.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/layout/redistribution.h"

namespace tessera {

namespace {

using Indices = std::vector<std::int64_t>;

// The boxes that some ranks have, and whose each is.
struct RankBoxes {
  BoxList boxes;
  Indices ranks;

  explicit RankBoxes(std::size_t tensor_dims) : boxes(tensor_dims) {}
  void add(const MeshLayout& layout, std::int64_t rank) {
    for (const LocalBox& local : layout.local_boxes(mesh_coordinate(layout.mesh_shape(), rank))) {
      boxes.push_back(local.box);
      ranks.push_back(rank);
    }
  }
};

// Among ranks that have the same coordinate wherever `from` doesn't shard there is each element once, so that every
// rank finds there what it lacks, itself first. Where `to` is partial no rank asks another.
std::vector<MeshMove> moves_between(const MeshLayout& from, const MeshLayout& to) {
  std::map<Indices, Indices> slices;  // ranks by the coordinates that a move doesn't change
  for (std::int64_t rank = 0; rank < mesh_size(from.mesh_shape()); ++rank) {
    Indices kept;
    const Indices coordinate = mesh_coordinate(from.mesh_shape(), rank);
    for (std::size_t m = 0; m < coordinate.size(); ++m) {
      if (!from.placements()[m].is_shard() || to.placements()[m].is_partial()) kept.push_back(coordinate[m]);
    }
    slices[kept].push_back(rank);
  }
  std::vector<MeshMove> moves;
  for (const auto& [kept, ranks] : slices) {
    RankBoxes sources(from.size().size()), destinations(from.size().size());
    for (const std::int64_t rank : ranks) {
      sources.add(from, rank);
      destinations.add(to, rank);
    }
    for (Transfer& transfer : plan_redistribution(sources.boxes, destinations.boxes)) {
      moves.push_back(
          {sources.ranks[transfer.source], destinations.ranks[transfer.destination], std::move(transfer.box)});
    }
  }
  std::stable_sort(moves.begin(), moves.end(),
                   [](const MeshMove& a, const MeshMove& b) { return a.destination < b.destination; });
  return moves;
}

std::vector<std::size_t> dims_of(const std::vector<MeshMove>& moves, const Indices& mesh_shape) {
  std::set<std::size_t> dims;
  for (const MeshMove& move : moves) {
    if (move.source == move.destination) continue;
    const Indices source = mesh_coordinate(mesh_shape, move.source);
    const Indices destination = mesh_coordinate(mesh_shape, move.destination);
    for (std::size_t m = 0; m < mesh_shape.size(); ++m) {
      if (source[m] != destination[m]) dims.insert(m);
    }
  }
  return {dims.begin(), dims.end()};
}

// Tries every way to reduce the partial mesh dimensions, and keeps the one for which least is sent, of those the one of
// the fewest steps.
class Search {
 public:
  Search(const MeshLayout& from, const MeshLayout& to) : to_(to) { reduce_from(0, from, {}, 0); }
  MeshRedistribution best() && { return std::move(*best_); }

 private:
  // `sent`: elements, over all ranks.
  void reduce_from(std::size_t mesh_dim, const MeshLayout& now, const std::vector<MeshReduction>& done,
                   std::int64_t sent) {
    while (mesh_dim < to_.placements().size() &&
           (!now.placements()[mesh_dim].is_partial() || now.placements()[mesh_dim] == to_.placements()[mesh_dim])) {
      ++mesh_dim;
    }
    if (mesh_dim == to_.placements().size()) {
      finish(now, done, sent);
      return;
    }
    const std::int64_t ranks = now.mesh_shape()[mesh_dim], held = elements_of_all(now);
    reduce_to(Placement::replicate(), mesh_dim, now, done, sent + 2 * held / ranks * (ranks - 1));
    if (to_.placements()[mesh_dim].is_partial()) return;
    for (std::size_t d = 0; d < now.size().size(); ++d) {
      const auto shard = Placement::shard(static_cast<std::int64_t>(d));
      // A rank gets a part of what it has, which is that of a cut before the later ones only if there are none.
      const auto later = now.placements().begin() + static_cast<std::ptrdiff_t>(mesh_dim) + 1;
      const bool is_cut_later = std::any_of(
          later, now.placements().end(), [&](const Placement& placement) { return placement.is_shard(shard.dim()); });
      if (!is_cut_later) reduce_to(shard, mesh_dim, now, done, sent + held / ranks * (ranks - 1));
    }
  }

  void reduce_to(const Placement& placement, std::size_t mesh_dim, const MeshLayout& now,
                 std::vector<MeshReduction> done, std::int64_t sent) {
    Placements placements = now.placements();
    placements[mesh_dim] = placement;
    done.push_back({mesh_dim, placement});
    reduce_from(mesh_dim + 1, MeshLayout(now.size(), now.mesh_shape(), std::move(placements)), done, sent);
  }

  void finish(const MeshLayout& now, const std::vector<MeshReduction>& done, std::int64_t sent) {
    MeshRedistribution plan;
    plan.reductions = done;
    plan.reduced = now.placements();
    plan.moves = moves_between(now, to_);
    plan.exchanged_dims = dims_of(plan.moves, now.mesh_shape());
    for (const MeshMove& move : plan.moves) {
      if (move.source != move.destination) sent += volume(move.box);
    }
    const std::size_t steps = done.size() + (plan.exchanged_dims.empty() ? 0 : 1);
    if (best_ && std::pair(best_sent_, best_steps_) <= std::pair(sent, steps)) return;
    best_ = std::move(plan);
    best_sent_ = sent;
    best_steps_ = steps;
  }

  static std::int64_t elements_of_all(const MeshLayout& layout) {
    std::int64_t count = 0;
    for (std::int64_t rank = 0; rank < mesh_size(layout.mesh_shape()); ++rank) {
      const std::vector<std::int64_t> sizes = layout.local_shape(mesh_coordinate(layout.mesh_shape(), rank)).sizes;
      count += volume(Box::whole(sizes));
    }
    return count;
  }

  const MeshLayout& to_;
  std::optional<MeshRedistribution> best_;
  std::int64_t best_sent_ = 0;
  std::size_t best_steps_ = 0;
};

}  // namespace

MeshRedistribution plan_redistribution(const MeshLayout& from, const MeshLayout& to) {
  if (from.size() != to.size() || from.mesh_shape() != to.mesh_shape()) {
    fail(ErrorCode::invalid_argument, "redistribution of a tensor of shape {} on a mesh of shape {} to {} on {}",
         shape_to_string(from.size()), shape_to_string(from.mesh_shape()), shape_to_string(to.size()),
         shape_to_string(to.mesh_shape()));
  }
  MeshRedistribution plan = Search(from, to).best();
  for (std::size_t m = 0; m < to.placements().size(); ++m) {
    if (to.placements()[m].is_partial() && from.placements()[m] != to.placements()[m]) plan.partial_dims.push_back(m);
  }
  return plan;
}

}  // namespace tessera
