#include "tensor/dtensor/rank_redistribution.h"

#include <c10/util/SmallVector.h>

#include <algorithm>
#include <cstddef>
#include <functional>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>

namespace tessera {

namespace {

using Sizes = std::vector<std::int64_t>;

// Finds ranks in the group of those that exchange.
struct GroupRanks {
  const Sizes& mesh_shape;
  const std::vector<std::size_t>& dims;  // in which they differ

  int rank_of(std::int64_t place) const {
    if (dims.empty()) return 0;
    return static_cast<int>(dims.size() == 1 ? mesh_coordinate(mesh_shape, place)[dims[0]] : place);
  }
  // Returns how many groups the ranks of the mesh make.
  std::int64_t count() const {
    if (dims.empty()) return mesh_size(mesh_shape);
    return dims.size() == 1 ? mesh_size(mesh_shape) / mesh_shape[dims[0]] : 1;
  }
};

std::vector<Box> boxes_in(const std::vector<LocalBox>& local) {
  std::vector<Box> boxes;
  boxes.reserve(local.size());
  for (const LocalBox& box : local) boxes.push_back(box.box);
  return boxes;
}

// A number for each number that layouts and coordinates are made of, so that equal keys have equal layouts. Usually in
// no memory of its own: where a plan has just been made, an allocation may take as long as all of a lookup.
class Key {
 public:
  Key(const MeshLayout& from, const MeshLayout& to, const Sizes& coordinate) {
    for (const Sizes* numbers : {&from.size(), &to.size(), &from.mesh_shape(), &to.mesh_shape(), &coordinate}) {
      numbers_.push_back(static_cast<std::int64_t>(numbers->size()));
      numbers_.append(numbers->begin(), numbers->end());
    }
    for (const Placements* placements : {&from.placements(), &to.placements()}) {
      for (const Placement& placement : *placements) {
        const auto kind = static_cast<std::int64_t>(placement.kind());
        numbers_.push_back(kind * 256 + static_cast<std::int64_t>(placement.reduce_op()));
        numbers_.push_back(placement.dim());
        numbers_.push_back(placement.split_factor());
      }
    }
  }
  std::string_view bytes() const {
    return {reinterpret_cast<const char*>(numbers_.data()), numbers_.size() * sizeof(std::int64_t)};
  }

 private:
  c10::SmallVector<std::int64_t, 64> numbers_;
};

struct BytesHash {
  using is_transparent = void;
  std::size_t operator()(std::string_view bytes) const { return std::hash<std::string_view>()(bytes); }
};

// Redistributions by their key. Begins again when they take too much memory.
class Cache {
 public:
  using Pointer = std::shared_ptr<const RankRedistribution>;
  static Cache& global() {
    static auto& cache = *new Cache;
    return cache;
  }
  Pointer find(const Key& key) {
    const std::lock_guard lock(mutex_);
    const auto found = entries_.find(key.bytes());
    return found == entries_.end() ? nullptr : found->second;
  }
  void add(const Key& key, Pointer entry) {
    constexpr std::size_t kMost = std::size_t{1} << 16;  // moves, some 20 MB
    const std::size_t size = 16 + entry->exchange.moves.size();
    const std::lock_guard lock(mutex_);
    if (size_ + size > kMost) {
      entries_.clear();
      size_ = 0;
    }
    if (entries_.emplace(key.bytes(), std::move(entry)).second) size_ += size;
  }

 private:
  std::mutex mutex_;
  std::unordered_map<std::string, Pointer, BytesHash, std::equal_to<>> entries_;
  std::size_t size_ = 0;
};

}  // namespace

RankRedistribution::RankRedistribution(MeshRedistribution plan, std::vector<LocalBox> has_in,
                                       std::vector<LocalBox> gets_in, const Sizes& mesh_shape, std::int64_t rank)
    : steps(std::move(plan)), has(std::move(has_in)), gets(std::move(gets_in)) {
  const GroupRanks ranks{mesh_shape, steps.exchanged_dims};
  exchange.sources = boxes_in(has);
  exchange.destinations = boxes_in(gets);
  exchange.size = {steps.moved_elements / ranks.count(), steps.largest_message, steps.run_length};
  for (MeshMove& move : std::exchange(steps.moves, {})) {
    if (move.source != rank && move.destination != rank) continue;
    exchange.moves.push_back({ranks.rank_of(move.source), ranks.rank_of(move.destination), move.source_box,
                              move.destination_box, std::move(move.box)});
  }
}

ProcessGroup RankRedistribution::exchange_group(const DeviceMesh& mesh) const {
  const std::vector<std::size_t>& dims = steps.exchanged_dims;
  if (dims.empty()) return {};
  return dims.size() == 1 ? mesh.group(static_cast<std::int64_t>(dims[0])) : mesh.group();
}

std::shared_ptr<const RankRedistribution> redistribution_of(const MeshLayout& from, const MeshLayout& to,
                                                            const Sizes& coordinate) {
  const Key key(from, to, coordinate);
  if (Cache::Pointer known = Cache::global().find(key)) return known;
  const std::int64_t rank = mesh_index(from.mesh_shape(), coordinate);
  MeshRedistribution plan = plan_redistribution(from, to, rank);
  std::vector<LocalBox> has = MeshLayout(from.size(), from.mesh_shape(), plan.reduced).local_boxes(coordinate);
  std::vector<LocalBox> gets = MeshLayout(to.size(), to.mesh_shape(), plan.moved).local_boxes(coordinate);
  auto made = std::make_shared<const RankRedistribution>(std::move(plan), std::move(has), std::move(gets),
                                                         from.mesh_shape(), rank);
  Cache::global().add(key, made);
  return made;
}

}  // namespace tessera
