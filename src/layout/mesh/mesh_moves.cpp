#include "layout/mesh/mesh_moves.h"

#include <algorithm>
#include <utility>

namespace tessera {

namespace {

using Indices = std::vector<std::int64_t>;

// The distance in the row-major order of a mesh between ranks that are neighbors along each dimension.
Indices strides_of(const Indices& mesh_shape) {
  Indices strides(mesh_shape.size(), 1);
  for (std::size_t m = mesh_shape.size(); m-- > 1;) strides[m - 1] = strides[m] * mesh_shape[m];
  return strides;
}

bool contains(const std::vector<std::size_t>& dims, std::size_t m) {
  return std::find(dims.begin(), dims.end(), m) != dims.end();
}

std::vector<bool> sharded_dims(const MeshLayout& layout) {
  std::vector<bool> are_sharded;
  for (const Placement& placement : layout.placements()) are_sharded.push_back(placement.is_shard());
  return are_sharded;
}

// How many elements of a dimension each rank keeps, by the rank's coordinates in the mesh dimensions that shard the
// dimension before or after.
class Kept {
 public:
  Kept(const DimChange& change, const Indices& mesh_shape) : strides_(mesh_shape.size(), 0) {
    std::int64_t count = 1;
    for (std::size_t m = mesh_shape.size(); m-- > 0;) {
      if (!contains(change.before.mesh_dims(), m) && !contains(change.after.mesh_dims(), m)) continue;
      strides_[m] = count;
      count *= mesh_shape[m];
    }
    elements_.assign(static_cast<std::size_t>(count), 0);
    Indices coordinate(mesh_shape.size(), 0);
    for (const Segment& segment : change.segments) {
      set(coordinate, change.before, segment.before.part);
      set(coordinate, change.after, segment.after.part);
      // No rank has both parts if they differ in a coordinate.
      if (change.before.part_of(coordinate) == segment.before.part)
        elements_[static_cast<std::size_t>(index_of(coordinate))] += segment.interval.size();
    }
  }
  std::int64_t at(const Indices& coordinate) const { return elements_[static_cast<std::size_t>(index_of(coordinate))]; }

 private:
  static void set(Indices& coordinate, const DimParts& parts, std::size_t part) {
    for (std::size_t k = parts.mesh_dims().size(); k-- > 0;) {
      const auto length = parts.mesh_lengths()[k];
      coordinate[parts.mesh_dims()[k]] = static_cast<std::int64_t>(part) % length;
      part /= static_cast<std::size_t>(length);
    }
  }
  std::int64_t index_of(const Indices& coordinate) const {
    std::int64_t index = 0;
    for (std::size_t m = 0; m < coordinate.size(); ++m) index += coordinate[m] * strides_[m];
    return index;
  }

  Indices strides_;  // in `elements_`, by mesh dimension
  std::vector<std::int64_t> elements_;
};

// Advances `position` to the next one in row-major order. Returns false after the last.
template <typename Position, typename Limits>
bool next_position(Position& position, const Limits& limits) {
  for (std::size_t i = position.size(); i-- > 0;) {
    if (++position[i] < limits[i]) return true;
    position[i] = 0;
  }
  return false;
}

}  // namespace

MeshMoves::MeshMoves(MeshLayout from, MeshLayout to) : from_(std::move(from)), to_(std::move(to)) {
  for (std::size_t d = 0; d < from_.size().size(); ++d) {
    dims_.emplace_back(from_, to_, d);
    is_empty_ = is_empty_ || from_.size()[d] == 0;
  }
}

std::int64_t MeshMoves::sent() const {
  const Indices& mesh_shape = to_.mesh_shape();
  std::int64_t received = volume(Box::full(to_.size()));  // by all ranks, also from themselves
  for (std::size_t m = 0; m < mesh_shape.size(); ++m) {
    if (!to_.placements()[m].is_shard()) received *= mesh_shape[m];
  }
  if (is_empty_) return 0;
  std::vector<Kept> kept;
  for (const DimChange& change : dims_) kept.emplace_back(change, mesh_shape);
  std::int64_t stays = 0;
  Indices coordinate(mesh_shape.size(), 0);
  do {
    std::int64_t here = 1;
    for (const Kept& of_dim : kept) here *= of_dim.at(coordinate);
    stays += here;
  } while (next_position(coordinate, mesh_shape));
  return received - stays;
}

bool MeshMoves::may_differ(std::size_t dim, std::size_t part, std::size_t m, std::int64_t source) const {
  const auto coordinate_along = [m](const DimParts& parts, std::size_t of) {
    const auto k = std::find(parts.mesh_dims().begin(), parts.mesh_dims().end(), m) - parts.mesh_dims().begin();
    return parts.coordinates_of(of)[static_cast<std::size_t>(k)];
  };
  for (std::size_t d = 0; d < dims_.size(); ++d) {
    const DimParts& after = dims_[d].after;
    if (!contains(after.mesh_dims(), m)) continue;
    if (d == dim) return coordinate_along(after, part) != source;
    // Any rank that has a part of the other dimension.
    for (std::size_t other = 0; other < after.size(); ++other) {
      if (!after[other].empty() && coordinate_along(after, other) != source) return true;
    }
    return false;
  }
  return to_.mesh_shape()[m] > 1;
}

std::vector<std::size_t> MeshMoves::exchanged_dims() const {
  std::vector<bool> is_exchanged(to_.mesh_shape().size(), false);
  for (std::size_t d = 0; d < dims_.size() && !is_empty_; ++d) {
    const DimParts& before = dims_[d].before;
    for (const Segment& segment : dims_[d].segments) {
      const Indices source = before.coordinates_of(segment.before.part);
      for (std::size_t k = 0; k < source.size(); ++k) {
        const std::size_t m = before.mesh_dims()[k];
        is_exchanged[m] = is_exchanged[m] || may_differ(d, segment.after.part, m, source[k]);
      }
    }
  }
  std::vector<std::size_t> dims;
  for (std::size_t m = 0; m < is_exchanged.size(); ++m) {
    if (is_exchanged[m]) dims.push_back(m);
  }
  return dims;
}

std::int64_t MeshMoves::largest_message() const {
  std::int64_t most = 1;
  for (const DimChange& change : dims_) {
    struct Shared {
      std::size_t before, after;
      std::int64_t elements;
    };
    std::vector<Shared> shared;
    for (const Segment& segment : change.segments)
      shared.push_back({segment.before.part, segment.after.part, segment.interval.size()});
    std::sort(shared.begin(), shared.end(), [](const Shared& a, const Shared& b) {
      return std::pair(a.before, a.after) < std::pair(b.before, b.after);
    });
    std::int64_t most_of_dim = 0;
    for (std::size_t i = 0, k = 0; i < shared.size(); i = k) {
      std::int64_t elements = 0;
      for (; k < shared.size() && shared[k].before == shared[i].before && shared[k].after == shared[i].after; ++k)
        elements += shared[k].elements;
      most_of_dim = std::max(most_of_dim, elements);
    }
    most *= most_of_dim;
  }
  return most;
}

std::int64_t MeshMoves::run_length() const {
  if (is_empty_) return 0;
  const auto runs_in = [&](const DimParts DimChange::*layout) {
    double run = 1;
    for (std::size_t d = dims_.size(); d-- > 0;) {
      const std::size_t segments = dims_[d].segments.size();
      run *= static_cast<double>(to_.size()[d]) / static_cast<double>(segments);
      if (segments > (dims_[d].*layout).interval_count()) break;
    }
    return run;
  };
  return static_cast<std::int64_t>(std::min(runs_in(&DimChange::before), runs_in(&DimChange::after)));
}

// Lists the moves of one rank.
class MeshMoves::RankMoves {
 public:
  RankMoves(const MeshMoves& all, std::int64_t rank)
      : all_(all),
        rank_(rank),
        coordinate_(mesh_coordinate(all.to_.mesh_shape(), rank)),
        strides_(strides_of(all.to_.mesh_shape())),
        varies_(sharded_dims(all.from_)),
        chosen_(all.dims_.size()) {
    for (std::size_t m = 0; m < varies_.size(); ++m) {
      if (!varies_[m]) kept_ += coordinate_[m] * strides_[m];
    }
  }

  std::vector<MeshMove> list() {
    add_received();
    const auto received = static_cast<std::ptrdiff_t>(moves_.size());
    sort(moves_.begin(), moves_.end(), [](const MeshMove& move) { return move.source; });
    add_sent();
    sort(moves_.begin() + received, moves_.end(), [](const MeshMove& move) { return move.destination; });
    return std::move(moves_);
  }

 private:
  using Moves = std::vector<MeshMove>;

  template <typename Key>
  static void sort(Moves::iterator begin, Moves::iterator end, const Key& key) {
    const auto is_before = [&](const MeshMove& a, const MeshMove& b) { return key(a) < key(b); };
    if (!std::is_sorted(begin, end, is_before)) std::stable_sort(begin, end, is_before);
  }

  // Adds what this rank gets, also from itself.
  void add_received() {
    for (std::size_t d = 0; d < chosen_.size(); ++d) {
      const std::size_t part = all_.dims_[d].after.part_of(coordinate_);
      choose(d, [&](const Segment& segment) { return segment.after.part == part; });
    }
    each_product([&](MeshMove move) {
      move.source = kept_;
      for (std::size_t d = 0; d < chosen_.size(); ++d)
        move.source += offset_of(all_.dims_[d].before, segment(d).before.part);
      move.destination = rank_;
      moves_.push_back(std::move(move));
    });
  }

  // Adds what it sends to others.
  void add_sent() {
    std::vector<std::size_t> free_dims;  // along which every rank gets it
    Indices free_lengths;
    for (std::size_t m = 0; m < varies_.size(); ++m) {
      if (!varies_[m] || all_.to_.placements()[m].is_shard()) continue;
      free_dims.push_back(m);
      free_lengths.push_back(all_.to_.mesh_shape()[m]);
    }
    for (std::size_t d = 0; d < chosen_.size(); ++d) {
      const DimChange& change = all_.dims_[d];
      const std::size_t part = change.before.part_of(coordinate_);
      choose(d, [&](const Segment& segment) {
        return segment.before.part == part && is_reached(change.after, segment.after.part);
      });
    }
    each_product([&](const MeshMove& move) {
      std::int64_t destination = kept_;
      for (std::size_t d = 0; d < chosen_.size(); ++d)
        destination += offset_of(all_.dims_[d].after, segment(d).after.part);
      Indices position(free_dims.size(), 0);
      do {
        std::int64_t there = destination;
        for (std::size_t i = 0; i < free_dims.size(); ++i) there += position[i] * strides_[free_dims[i]];
        if (there == rank_) continue;
        moves_.push_back(move);
        moves_.back().source = rank_;
        moves_.back().destination = there;
      } while (next_position(position, free_lengths));
    });
  }

  // Whether the ranks that have a part after have this rank's coordinates where moves keep them.
  bool is_reached(const DimParts& after, std::size_t part) const {
    const Indices coordinates = after.coordinates_of(part);
    for (std::size_t k = 0; k < coordinates.size(); ++k) {
      const std::size_t m = after.mesh_dims()[k];
      if (!varies_[m] && coordinates[k] != coordinate_[m]) return false;
    }
    return true;
  }

  // Returns what the coordinates of a part add to the index of a rank in the mesh, where moves do not keep them.
  std::int64_t offset_of(const DimParts& parts, std::size_t part) const {
    std::int64_t offset = 0;
    for (std::size_t k = parts.mesh_dims().size(); k-- > 0;) {
      const auto length = static_cast<std::size_t>(parts.mesh_lengths()[k]);
      const std::size_t m = parts.mesh_dims()[k];
      if (varies_[m]) offset += static_cast<std::int64_t>(part % length) * strides_[m];
      part /= length;
    }
    return offset;
  }

  template <typename F>
  void choose(std::size_t dim, const F& is_chosen) {
    chosen_[dim].clear();
    for (const Segment& segment : all_.dims_[dim].segments) {
      if (is_chosen(segment)) chosen_[dim].push_back(&segment);
    }
  }

  const Segment& segment(std::size_t dim) const { return *chosen_[dim][position_[dim]]; }

  // Calls `f` for each choice of one segment per dimension, row-major, with a move that has all but its ranks.
  template <typename F>
  void each_product(const F& f) {
    const std::size_t dims = chosen_.size();
    std::vector<std::size_t> counts;
    for (const auto& segments : chosen_) counts.push_back(segments.size());
    if (std::find(counts.begin(), counts.end(), std::size_t{0}) != counts.end()) return;
    position_.assign(dims, 0);
    do {
      MeshMove move;
      for (Indices* numbers :
           {&move.box.offsets, &move.box.sizes, &move.source_extent.offsets, &move.source_extent.sizes})
        numbers->resize(dims);
      for (std::size_t d = 0; d < dims; ++d) {
        const Segment& at = segment(d);
        const std::span<const Interval> source = all_.dims_[d].before[at.before.part];
        const Interval& extent = source[at.before.interval];
        move.box.offsets[d] = at.interval.begin;
        move.box.sizes[d] = at.interval.size();
        move.source_extent.offsets[d] = extent.begin;
        move.source_extent.sizes[d] = extent.size();
        move.source_box = move.source_box * source.size() + at.before.interval;
        move.destination_box = move.destination_box * all_.dims_[d].after[at.after.part].size() + at.after.interval;
      }
      f(std::move(move));
    } while (next_position(position_, counts));
  }

  const MeshMoves& all_;
  const std::int64_t rank_;
  const Indices coordinate_, strides_;
  const std::vector<bool> varies_;  // the mesh dimensions in which source and destination may have other coordinates
  std::int64_t kept_ = 0;           // what the other coordinates add to the index of a rank
  std::vector<std::vector<const Segment*>> chosen_;  // by dimension
  std::vector<std::size_t> position_;                // in `chosen_`
  Moves moves_;
};

std::vector<MeshMove> MeshMoves::of_rank(std::int64_t rank) const {
  if (is_empty_) return {};
  return RankMoves(*this, rank).list();
}

}  // namespace tessera
