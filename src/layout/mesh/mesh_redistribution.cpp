#include "tessera/layout/mesh_redistribution.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "layout/mesh/mesh_moves.h"
#include "tessera/base/error.h"
#include "tessera/layout/coverage.h"
#include "tessera/layout/internal/exchange_size.h"
#include "tessera/layout/redistribution.h"
#include "tessera/layout/redistribution_cost.h"

namespace tessera {

namespace {

using Indices = std::vector<std::int64_t>;

using LocalBoxes = std::vector<LocalBox>;

std::vector<LocalBoxes> boxes_of_all(const MeshLayout& layout) {
  std::vector<LocalBoxes> boxes;
  for (std::int64_t rank = 0; rank < mesh_size(layout.mesh_shape()); ++rank) {
    boxes.push_back(layout.local_boxes(mesh_coordinate(layout.mesh_shape(), rank)));
  }
  return boxes;
}

// The boxes of some ranks, and the owner of each box.
struct RankBoxes {
  struct Owner {
    std::int64_t rank = 0;
    std::size_t box = 0;
  };
  BoxList boxes;
  std::vector<Owner> owners;

  RankBoxes(std::size_t tensor_dims, const std::vector<LocalBoxes>& of_all, const Indices& ranks) : boxes(tensor_dims) {
    for (const std::int64_t rank : ranks) {
      const LocalBoxes& local = of_all[static_cast<std::size_t>(rank)];
      for (std::size_t i = 0; i < local.size(); ++i) {
        boxes.push_back(local[i].box);
        owners.push_back({rank, i});
      }
    }
  }
};

void check_partition(const MeshLayout& layout, const RankBoxes& has) {
  const auto refuse = [&](const std::string& why) {
    fail(ErrorCode::invalid_argument, "boxes of a tensor of shape {} as {} on a mesh of shape {}: {}",
         shape_to_string(layout.size()), to_string(layout.placements()), shape_to_string(layout.mesh_shape()), why);
  };
  if (const auto overlap = find_overlap(has.boxes)) {
    refuse(fmt::format("rank {} has {} and rank {} has {}, expected no overlap", has.owners[overlap->first].rank,
                       to_string(has.boxes[overlap->first]), has.owners[overlap->second].rank,
                       to_string(has.boxes[overlap->second])));
  }
  if (const auto hole = find_hole(layout.size(), has.boxes))
    refuse(fmt::format("no rank has {}, expected exactly one", to_string(*hole)));
}

// Ranks with equal coordinates in all dimensions that `from` does not shard hold each element once. So every rank finds
// the elements that it lacks among these ranks, its own elements first.
std::vector<MeshMove> moves_between(const MeshLayout& from, const std::vector<LocalBoxes>& sources,
                                    const MeshLayout& to) {
  std::map<Indices, Indices> slices;  // ranks by the coordinates that a move keeps
  for (std::int64_t rank = 0; rank < mesh_size(from.mesh_shape()); ++rank) {
    Indices kept;
    const Indices coordinate = mesh_coordinate(from.mesh_shape(), rank);
    for (std::size_t m = 0; m < coordinate.size(); ++m) {
      if (!from.placements()[m].is_shard()) kept.push_back(coordinate[m]);
    }
    slices[kept].push_back(rank);
  }
  const std::vector<LocalBoxes> destinations = boxes_of_all(to);
  std::vector<MeshMove> moves;
  for (const auto& [kept, ranks] : slices) {
    const RankBoxes has(from.size().size(), sources, ranks), wants(from.size().size(), destinations, ranks);
    check_partition(from, has);
    for (Transfer& transfer : plan_transfers(has.boxes, wants.boxes)) {
      const RankBoxes::Owner &source = has.owners[transfer.source], &destination = wants.owners[transfer.destination];
      moves.push_back({source.rank, destination.rank, source.box, destination.box, std::move(transfer.box),
                       Box(has.boxes[transfer.source])});
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

// Returns whether a mesh dimension after `m` shards `dim`.
bool is_sharded_after(const MeshLayout& layout, std::size_t m, std::int64_t dim) {
  return std::any_of(layout.placements().begin() + static_cast<std::ptrdiff_t>(m) + 1, layout.placements().end(),
                     [dim](const Placement& placement) { return placement.is_shard(dim); });
}

// Sets what follows from the moves of all ranks.
void measure(MeshRedistribution& plan, const MeshLayout& to) {
  ExchangeSizeSum sum;
  for (const MeshMove& move : plan.moves) {
    const auto boxes = to.local_boxes(mesh_coordinate(to.mesh_shape(), move.destination));
    sum.add(move.source, move.destination, move.box, move.source_extent, boxes[move.destination_box].box);
  }
  const ExchangeSize size = sum.total();
  plan.sent = plan.moved_elements = size.sent;
  plan.largest_message = size.largest_message;
  plan.run_length = size.run_length;
}

// Tries every way to reduce the partial mesh dimensions. Keeps the one that costs least.
class Search {
 public:
  struct Found {
    MeshRedistribution plan;  // without moves
    MeshMoves moves;
  };
  Search(const MeshLayout& from, const MeshLayout& to) : to_(to) { reduce_from(0, from, {}, 0); }
  Found best() && { return std::move(*best_); }

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
    for (std::size_t d = 0; d < now.size().size(); ++d) {
      const auto shard = Placement::shard(static_cast<std::int64_t>(d));
      // A rank gets a part of its local tensor, which is its part of the full tensor only if no later dimension shards
      // it.
      if (!is_sharded_after(now, mesh_dim, shard.dim()))
        reduce_to(shard, mesh_dim, now, done, sent + held / ranks * (ranks - 1));
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
    MeshMoves moves(now, to_);
    MeshRedistribution plan;
    plan.reductions = done;
    plan.reduced = now.placements();
    plan.exchanged_dims = moves.exchanged_dims();
    plan.moved_elements = moves.sent();
    plan.sent = sent + plan.moved_elements;
    const std::size_t collectives = done.size() + (plan.exchanged_dims.empty() ? 0 : 1);
    const RedistributionCost cost{static_cast<std::int64_t>(collectives),
                                  static_cast<double>(plan.sent) / static_cast<double>(mesh_size(now.mesh_shape()))};
    if (best_ && best_cost_.total() <= cost.total()) return;
    best_ = Found{std::move(plan), std::move(moves)};
    best_cost_ = cost;
  }

  static std::int64_t elements_of_all(const MeshLayout& layout) {
    std::int64_t count = volume(Box::full(layout.size()));
    for (std::size_t m = 0; m < layout.placements().size(); ++m) {
      if (!layout.placements()[m].is_shard()) count *= layout.mesh_shape()[m];
    }
    return count;
  }

  const MeshLayout& to_;
  std::optional<Found> best_;
  RedistributionCost best_cost_;
};

void check(const MeshLayout& from, const MeshLayout& to) {
  if (from.size() != to.size() || from.mesh_shape() != to.mesh_shape()) {
    fail(ErrorCode::invalid_argument,
         "redistribute a tensor of shape {} on a mesh of shape {}: the target has shape {} on a mesh of shape {}, "
         "expected the same",
         shape_to_string(from.size()), shape_to_string(from.mesh_shape()), shape_to_string(to.size()),
         shape_to_string(to.mesh_shape()));
  }
}

}  // namespace

namespace {

// Returns the best plan, and what dimensions that become partial are until then.
Search::Found best_plan(const MeshLayout& from, const MeshLayout& to) {
  check(from, to);
  // A dimension that becomes partial is replicated until then. It stays sharded if it was, unless a later shard of the
  // same tensor dimension would then have other elements.
  Placements moved = to.placements();
  std::vector<std::size_t> partial_dims;
  for (std::size_t m = moved.size(); m-- > 0;) {
    const Placement before = from.placements()[m];
    if (!moved[m].is_partial() || moved[m] == before) continue;  // what stays partial is reduced in any order
    const bool stays = before.is_shard() && !is_sharded_after(to, m, before.dim());
    moved[m] = stays ? before : Placement::replicate();
    partial_dims.push_back(m);
  }
  const MeshLayout target(to.size(), to.mesh_shape(), moved);
  Search::Found best = Search(from, target).best();
  best.plan.moved = std::move(moved);
  best.plan.partial_dims = std::move(partial_dims);
  return best;
}

}  // namespace

MeshRedistribution plan_redistribution(const MeshLayout& from, const MeshLayout& to, std::int64_t rank) {
  Search::Found best = best_plan(from, to);
  if (rank < 0 || rank >= mesh_size(from.mesh_shape())) {
    fail(ErrorCode::invalid_argument, "redistribute a tensor on a mesh of shape {}: rank {}, expected 0 to {}",
         shape_to_string(from.mesh_shape()), rank, mesh_size(from.mesh_shape()) - 1);
  }
  MeshRedistribution plan = std::move(best.plan);
  plan.moves = best.moves.of_rank(rank);
  plan.run_length = best.moves.run_length();
  if (!plan.exchanged_dims.empty()) plan.largest_message = best.moves.largest_message();
  return plan;
}

MeshRedistribution plan_redistribution(const MeshLayout& from, const std::vector<std::vector<LocalBox>>& sources,
                                       const MeshLayout& to) {
  check(from, to);
  for (std::size_t i = 0; i < from.placements().size(); ++i) {
    const Placement &given = from.placements()[i], &wanted = to.placements()[i];
    if (given == wanted || (!given.is_partial() && !wanted.is_partial())) continue;
    fail(ErrorCode::invalid_argument,
         "redistribute boxes of a tensor of shape {} from {} to {}: expected no partial placement that changes",
         shape_to_string(from.size()), to_string(from.placements()), to_string(to.placements()));
  }
  MeshRedistribution plan;
  plan.reduced = from.placements();
  plan.moved = to.placements();
  plan.moves = moves_between(from, sources, to);
  plan.exchanged_dims = dims_of(plan.moves, from.mesh_shape());
  measure(plan, to);
  return plan;
}

std::int64_t redistribution_cost(const MeshLayout& from, const MeshLayout& to) { return best_plan(from, to).plan.sent; }

}  // namespace tessera
