#include "tensor/dtensor/mesh_exchange.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full_like.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <utility>

#include "tensor/exchange/box_copy.h"
#include "tensor/exchange/exchange.h"
#include "tensor/exchange/reduce.h"
#include "tessera/base/bytes.h"
#include "tessera/base/error.h"
#include "tessera/layout/mesh_redistribution.h"
#include "tessera/tensor/dtensor/separate_reductions.h"
#include "tessera/tensor/internal/box_view.h"
#include "tessera/tensor/internal/empty_shard.h"

namespace tessera {

namespace {

using Sizes = std::vector<std::int64_t>;
using LocalBoxes = std::vector<LocalBox>;

at::Tensor plain(const at::Tensor& tensor) { return tensor.detach().resolve_conj().resolve_neg(); }

at::Tensor empty_like_part(const at::Tensor& like, at::IntArrayRef size) {
  return empty_shard(size, at::TensorOptions().dtype(like.scalar_type()).device(like.device()));
}

// --- from replicated or sharded to partial

// Returns the neutral element of `op`.
at::Scalar neutral(ReduceOp op, at::ScalarType type) {
  if (op == ReduceOp::product) return 1;
  if (op != ReduceOp::min && op != ReduceOp::max) return 0;
  const bool is_max = op == ReduceOp::max;
  if (at::isFloatingType(type)) {
    return is_max ? -std::numeric_limits<double>::infinity() : std::numeric_limits<double>::infinity();
  }
  if (type == at::kBool) return !is_max;
  if (type == at::kByte) return is_max ? 0 : 255;
  const auto bits = static_cast<int>(8 * c10::elementSize(type)) - 1;
  const auto highest = static_cast<std::int64_t>((std::uint64_t{1} << bits) - 1);
  return is_max ? -highest - 1 : highest;
}

// Returns this rank's summand (or factor, ...) of `full`, which is replicated along the dimension: reducing those of
// all ranks with `op` gives `full`.
at::Tensor part_of_replicated(const at::Tensor& full, ReduceOp op, std::int64_t ranks, std::int64_t rank) {
  const bool is_divided = op == ReduceOp::sum && (at::isFloatingType(full.scalar_type()) || full.is_complex());
  if (is_divided) return full.div(ranks);
  if (op == ReduceOp::sum || op == ReduceOp::product) {
    return rank == 0 ? full : at::full_like(full, neutral(op, full.scalar_type()));
  }
  return full;
}

// The same for a tensor that is sharded along mesh dimension `m` under `layout`, of which this rank has `part`.
at::Tensor part_of_sharded(const at::Tensor& part, const MeshLayout& layout, const MeshLayout& partial, std::size_t m,
                           const Sizes& coordinate) {
  const ReduceOp op = partial.placements()[m].reduce_op();
  at::Tensor result = empty_like_part(part, partial.local_shape(coordinate).sizes);
  result.fill_(neutral(op, part.scalar_type()));
  const LocalBoxes places = partial.local_boxes(coordinate);
  for (const LocalBox& box : layout.local_boxes(coordinate)) {
    for (const LocalBox& place : places) {
      const std::optional<Box> shared = intersect(box.box, place.box);
      if (!shared) continue;
      const auto within = [&](const at::Tensor& local, const LocalBox& of) {
        return box_view(box_view(local, {of.local_offsets, of.box.sizes}), of.box, *shared);
      };
      copy_elements(within(result, place), within(part, box));
    }
  }
  return op == ReduceOp::average ? result.mul(layout.mesh_shape()[m]) : result;
}

// --- reductions along several mesh dimensions at once

thread_local bool reduces_separately = false;

// One collective that reduces all partial mesh dimensions of a tensor.
struct MergedReduction {
  const ProcessGroup* group;
  ReduceOp op;
  std::int64_t divisor;  // of the result: the ranks that average, if others sum
  Placement to;          // of each of these mesh dimensions
  MeshLayout reduced;
};

// Returns nullopt if there are fewer than two partial dimensions, if the ranks get different parts along them, or if
// the mesh has no group along them.
std::optional<MergedReduction> merged_reduction(const DeviceMesh& mesh, const MeshLayout& from, const MeshLayout& to) {
  if (reduces_separately) return std::nullopt;
  std::vector<std::int64_t> dims;
  std::int64_t ranks = 1, averaging = 1;
  Placements placements = from.placements();
  for (std::size_t m = 0; m < placements.size(); ++m) {
    if (!placements[m].is_partial()) continue;
    const ReduceOp op = placements[m].reduce_op();
    if (op == ReduceOp::average) averaging *= mesh.shape()[m];
    ranks *= mesh.shape()[m];
    dims.push_back(static_cast<std::int64_t>(m));
    placements[m] = to.placements()[m];
  }
  if (dims.size() < 2) return std::nullopt;
  const Placement target = placements[static_cast<std::size_t>(dims[0])];
  ReduceOp op = from.placements()[static_cast<std::size_t>(dims[0])].reduce_op();
  bool is_mixed = false;
  for (const std::int64_t m : dims) {
    if (!(placements[static_cast<std::size_t>(m)] == target)) return std::nullopt;
    is_mixed = is_mixed || from.placements()[static_cast<std::size_t>(m)].reduce_op() != op;
  }
  if (target.is_partial() || target.is_strided()) return std::nullopt;
  if (target.is_shard()) {
    // Chunks of chunks are chunks if they are even and nothing else splits the dimension.
    const auto sharding = std::count_if(placements.begin(), placements.end(),
                                        [&](const Placement& each) { return each.is_shard(target.dim()); });
    const bool is_even = from.size()[static_cast<std::size_t>(target.dim())] % ranks == 0;
    if (!is_even || sharding != static_cast<std::ptrdiff_t>(dims.size())) return std::nullopt;
  }
  const ProcessGroup* group = mesh.find_group(dims);
  if (group == nullptr) return std::nullopt;
  if (is_mixed) op = ReduceOp::sum;
  return MergedReduction{group, op, is_mixed ? averaging : 1, target,
                         MeshLayout(from.size(), from.mesh_shape(), std::move(placements))};
}

// --- elements that move

// The ranks that exchange with this one, by their index in the mesh: along one dimension, or all.
struct Partners {
  ProcessGroup group;
  std::vector<std::int64_t> places;

  Partners(const DeviceMesh& mesh, const std::vector<std::size_t>& dims) {
    if (dims.empty()) {
      places.push_back(mesh_index(mesh.shape(), *mesh.coordinate()));
    } else if (dims.size() == 1) {
      group = mesh.group(static_cast<std::int64_t>(dims[0]));
      Sizes coordinate = *mesh.coordinate();
      for (coordinate[dims[0]] = 0; coordinate[dims[0]] < mesh.shape()[dims[0]]; ++coordinate[dims[0]]) {
        places.push_back(mesh_index(mesh.shape(), coordinate));
      }
    } else {
      group = mesh.group();
      places.resize(static_cast<std::size_t>(mesh.size()));
      std::iota(places.begin(), places.end(), std::int64_t{0});
    }
  }
};

using BoxesOf = std::function<LocalBoxes(std::int64_t place)>;

BoxesOf boxes_of(const MeshLayout& layout) {
  return [&layout](std::int64_t place) { return layout.local_boxes(mesh_coordinate(layout.mesh_shape(), place)); };
}

// The boxes of `places` in the order of a plan, and where each rank's begin.
struct Places {
  std::vector<ShardPlace> boxes;
  std::map<std::int64_t, std::size_t> begins;

  Places(const std::vector<std::int64_t>& places, const BoxesOf& boxes_of) {
    for (std::size_t rank = 0; rank < places.size(); ++rank) {
      begins[places[rank]] = boxes.size();
      std::size_t local = 0;
      for (LocalBox& box : boxes_of(places[rank])) {
        boxes.push_back({static_cast<int>(rank), local++, std::move(box.box)});
      }
    }
  }
};

ReshardPlan plan_of(const std::vector<MeshMove>& moves, const Partners& partners, const BoxesOf& from,
                    const BoxesOf& to, const at::Tensor& like) {
  Places sources(partners.places, from), destinations(partners.places, to);
  ReshardPlan plan;
  plan.element_bytes = static_cast<std::int64_t>(like.element_size());
  plan.staging_device = like.device();
  plan.is_on_cpu = like.is_cpu();
  for (const MeshMove& move : moves) {
    const auto source = sources.begins.find(move.source), destination = destinations.begins.find(move.destination);
    if (source == sources.begins.end() || destination == destinations.begins.end()) continue;
    plan.moves.push_back({source->second + move.source_box, destination->second + move.destination_box, move.box});
  }
  plan.sources = std::move(sources.boxes);
  plan.destinations = std::move(destinations.boxes);
  return plan;
}

// Contiguous tensors to receive a local tensor's boxes: views of it, or buffers that `finish` copies into it if a box
// is not contiguous there.
class Target {
 public:
  Target(const at::Tensor& local, const LocalBoxes& boxes) {
    for (const LocalBox& box : boxes) {
      places_.push_back(box_view(local, {box.local_offsets, box.box.sizes}));
      tensors_.push_back(places_.back().is_contiguous() ? places_.back()
                                                        : places_.back().clone(at::MemoryFormat::Contiguous));
    }
  }
  const std::vector<at::Tensor>& tensors() const { return tensors_; }
  void finish() const {
    for (std::size_t i = 0; i < places_.size(); ++i) {
      if (!places_[i].is_same(tensors_[i])) copy_elements(places_[i], tensors_[i]);
    }
  }

 private:
  std::vector<at::Tensor> places_, tensors_;
};

// Fills `local`, the local tensor under `to`. `sources` are this rank's tensors of its boxes under `from`.
at::Tensor moved(const DeviceMesh& mesh, const std::vector<MeshMove>& moves, const std::vector<std::size_t>& dims,
                 const BoxesOf& from, const MeshLayout& to, std::vector<at::Tensor> sources, const at::Tensor& local) {
  for (at::Tensor& source : sources) source = source.contiguous();
  const Partners partners(mesh, dims);
  const ReshardPlan plan = plan_of(moves, partners, from, boxes_of(to), local);
  const Target target(local, to.local_boxes(*mesh.coordinate()));
  exchange({partners.group, plan, sources, target.tensors(), local.scalar_type()}, {});
  target.finish();
  return local;
}

// As `moved`, with one all-to-all that runs until `finish`.
class StartedMove {
 public:
  StartedMove(const DeviceMesh& mesh, const std::vector<MeshMove>& moves, const std::vector<std::size_t>& dims,
              const BoxesOf& from, const MeshLayout& to, std::vector<at::Tensor> sources, at::Tensor local)
      : partners_(mesh, dims),
        plan_(plan_of(moves, partners_, from, boxes_of(to), local)),
        target_(local, to.local_boxes(*mesh.coordinate())),
        sources_(std::move(sources)),
        local_(std::move(local)) {
    for (at::Tensor& source : sources_) source = source.contiguous();
    const Exchange parts = all_parts();
    const at::Tensor in = at::empty({count(true)}, local_.options());
    received_ = at::empty({count(false)}, local_.options());
    std::int64_t begin = 0;
    each_move(true, [&](const Move& move) {
      const std::int64_t elements = volume(move.box);
      copy_elements(in.narrow(0, begin, elements).view(move.box.sizes), parts.taken(move, move.box));
      begin += elements;
    });
    pending_ = partners_.group.start_all_to_all(received_, in, splits(false), splits(true));
    parts.copy_what_stays();
  }

  at::Tensor finish() {
    pending_.wait();
    const Exchange parts = all_parts();
    std::int64_t begin = 0;
    each_move(false, [&](const Move& move) {
      const std::int64_t elements = volume(move.box);
      copy_elements(parts.given(move, move.box), received_.narrow(0, begin, elements).view(move.box.sizes));
      begin += elements;
    });
    target_.finish();
    return local_;
  }

 private:
  Exchange all_parts() const { return {partners_.group, plan_, sources_, target_.tensors(), local_.scalar_type()}; }
  // Returns the other rank of a move that this rank sends, or receives.
  std::optional<int> partner(const Move& move, bool sends) const {
    const int source = plan_.source_rank(move), destination = plan_.destination_rank(move),
              mine = partners_.group.rank();
    if (source == destination || (sends ? source : destination) != mine) return std::nullopt;
    return sends ? destination : source;
  }
  // Visits the moves of this rank, by the other rank.
  template <typename F>
  void each_move(bool sends, const F& f) const {
    for (int rank = 0; rank < partners_.group.size(); ++rank) {
      for (const Move& move : plan_.moves) {
        if (partner(move, sends) == rank) f(move);
      }
    }
  }
  std::vector<std::int64_t> splits(bool sends) const {
    std::vector<std::int64_t> elements(static_cast<std::size_t>(partners_.group.size()), 0);
    each_move(sends,
              [&](const Move& move) { elements[static_cast<std::size_t>(*partner(move, sends))] += volume(move.box); });
    return elements;
  }
  std::int64_t count(bool sends) const {
    const std::vector<std::int64_t> elements = splits(sends);
    return std::accumulate(elements.begin(), elements.end(), std::int64_t{0});
  }

  Partners partners_;
  ReshardPlan plan_;
  Target target_;
  std::vector<at::Tensor> sources_;
  at::Tensor local_, received_;
  PendingCollective pending_;
};

std::vector<at::Tensor> views_of(const at::Tensor& local, const LocalBoxes& boxes) {
  std::vector<at::Tensor> views;
  for (const LocalBox& box : boxes) views.push_back(box_view(local, {box.local_offsets, box.box.sizes}));
  return views;
}

// The boxes of all ranks, gathered.
struct AllShards {
  std::vector<LocalBoxes> boxes;
  at::ScalarType dtype = at::kFloat;

  // Every rank throws Error(invalid_argument) if a box is not within the tensor or the dtypes differ.
  AllShards(const ProcessGroup& group, const Sizes& size, const LocalShardsWrapper& local) {
    Sizes mine;
    for (const at::Tensor& shard : local.local_shards()) {
      const Box& chunk = local.local_chunks()[mine.size() / (2 * size.size() + 1)];
      mine.push_back(static_cast<std::int64_t>(shard.scalar_type()));
      mine.insert(mine.end(), chunk.offsets.begin(), chunk.offsets.end());
      mine.insert(mine.end(), chunk.sizes.begin(), chunk.sizes.end());
    }
    std::optional<std::pair<std::size_t, at::ScalarType>> found;  // the first dtype, and a rank that has it
    for (const Bytes& bytes : group.all_gather_bytes(bytes_of(mine))) {
      LocalBoxes& of_rank = boxes.emplace_back();
      const std::size_t record = 2 * size.size() + 1;
      Sizes theirs(bytes.size() / sizeof(std::int64_t));
      if (!bytes.empty()) std::memcpy(theirs.data(), bytes.data(), bytes.size());
      for (auto at = theirs.begin(); at != theirs.end(); at += static_cast<std::ptrdiff_t>(record)) {
        const auto middle = at + 1 + static_cast<std::ptrdiff_t>(size.size());
        Box box(Sizes(at + 1, middle), Sizes(middle, at + static_cast<std::ptrdiff_t>(record)));
        const auto type = static_cast<at::ScalarType>(*at);
        const std::size_t rank = boxes.size() - 1;
        if (!is_valid(box, size)) {
          fail(ErrorCode::invalid_argument, "local shards of a tensor of shape {}: rank {} has {}, expected it within",
               shape_to_string(size), rank, to_string(box));
        }
        if (!found) found = {rank, type};
        if (type != found->second) {
          fail(ErrorCode::invalid_argument,
               "local shards of a tensor of shape {}: rank {} has {}, rank {} {}, expected shards of one dtype",
               shape_to_string(size), found->first, c10::toString(found->second), rank, c10::toString(type));
        }
        of_rank.push_back({std::move(box), Sizes(size.size(), 0)});
      }
    }
    if (found) dtype = found->second;
  }

 private:
  static ByteView bytes_of(const Sizes& numbers) {
    return {reinterpret_cast<const std::uint8_t*>(numbers.data()), numbers.size() * sizeof(std::int64_t)};
  }
};

}  // namespace

SeparateReductions::SeparateReductions() : outer_(std::exchange(reduces_separately, true)) {}
SeparateReductions::~SeparateReductions() { reduces_separately = outer_; }

at::Tensor redistribute_local(const DeviceMesh& mesh, const MeshLayout& from, const MeshLayout& to,
                              const at::Tensor& local) {
  if (from == to || !mesh.has_this_rank()) return local;
  if (local.is_meta()) return empty_like_part(local, to.local_shape(*mesh.coordinate()).sizes);
  if (const std::optional<MergedReduction> merged = merged_reduction(mesh, from, to)) {
    at::Tensor reduced = merged->to.is_replicate()
                             ? all_reduced(*merged->group, plain(local), merged->op)
                             : reduce_scattered(*merged->group, plain(local), merged->op, merged->to.dim());
    if (merged->divisor > 1) reduced = reduced.div(merged->divisor);
    return redistribute_local(mesh, merged->reduced, to, reduced);
  }
  const MeshRedistribution plan = plan_redistribution(from, to);
  at::Tensor now = plain(local);
  for (const MeshReduction& step : plan.reductions) {
    const ProcessGroup& group = mesh.group(static_cast<std::int64_t>(step.mesh_dim));
    const ReduceOp op = from.placements()[step.mesh_dim].reduce_op();
    now = step.to.is_replicate() ? all_reduced(group, now, op) : reduce_scattered(group, now, op, step.to.dim());
  }
  const Sizes& coordinate = *mesh.coordinate();
  const MeshLayout reduced(from.size(), from.mesh_shape(), plan.reduced);
  MeshLayout layout(from.size(), from.mesh_shape(), plan.moved);
  const LocalBoxes has = reduced.local_boxes(coordinate);
  const Sizes size = layout.local_shape(coordinate).sizes;
  if (!plan.exchanged_dims.empty() || has != layout.local_boxes(coordinate) || now.sizes() != at::IntArrayRef(size)) {
    now = moved(mesh, plan.moves, plan.exchanged_dims, boxes_of(reduced), layout, views_of(now, has),
                empty_like_part(now, size));
  }
  for (const std::size_t m : plan.partial_dims) {
    Placements placements = layout.placements();
    placements[m] = to.placements()[m];
    MeshLayout next(from.size(), from.mesh_shape(), std::move(placements));
    now = layout.placements()[m].is_shard()
              ? part_of_sharded(now, layout, next, m, coordinate)
              : part_of_replicated(now, next.placements()[m].reduce_op(), mesh.shape()[m], coordinate[m]);
    layout = std::move(next);
  }
  return now.is_alias_of(local) ? now.clone() : now;
}

std::function<at::Tensor()> start_redistribute_local(const DeviceMesh& mesh, const MeshLayout& from,
                                                     const MeshLayout& to, const at::Tensor& local) {
  const auto only_local_steps = [&](const MeshLayout& now) {
    const MeshRedistribution rest = plan_redistribution(now, to);
    return rest.reductions.empty() && rest.exchanged_dims.empty();
  };
  if (local.is_meta() || only_local_steps(from)) {
    return [result = redistribute_local(mesh, from, to, local)] { return result; };
  }
  const auto reduced = [](const ProcessGroup& group, const at::Tensor& tensor, ReduceOp op, const Placement& target) {
    return target.is_replicate() ? start_all_reduce(group, tensor, op)
                                 : start_reduce_scatter(group, tensor, op, target.dim());
  };
  if (const std::optional<MergedReduction> merged = merged_reduction(mesh, from, to)) {
    const auto finish = [wait = reduced(*merged->group, plain(local), merged->op, merged->to),
                         divisor = merged->divisor] {
      const at::Tensor sum = wait();
      return divisor > 1 ? sum.div(divisor) : sum;
    };
    if (!only_local_steps(merged->reduced)) return start_redistribute_local(mesh, merged->reduced, to, finish());
    return [finish, mesh, now = merged->reduced, to] { return redistribute_local(mesh, now, to, finish()); };
  }
  const MeshRedistribution plan = plan_redistribution(from, to);
  if (!plan.reductions.empty()) {
    const MeshReduction& step = plan.reductions[0];
    Placements placements = from.placements();
    const ReduceOp op = placements[step.mesh_dim].reduce_op();
    placements[step.mesh_dim] = step.to;
    const MeshLayout now(from.size(), from.mesh_shape(), std::move(placements));
    const auto finish = reduced(mesh.group(static_cast<std::int64_t>(step.mesh_dim)), plain(local), op, step.to);
    if (!only_local_steps(now)) return start_redistribute_local(mesh, now, to, finish());
    return [finish, mesh, now, to] { return redistribute_local(mesh, now, to, finish()); };
  }
  const Sizes& coordinate = *mesh.coordinate();
  const MeshLayout layout(from.size(), from.mesh_shape(), plan.moved);
  const at::Tensor now = plain(local);
  const auto move = std::make_shared<StartedMove>(mesh, plan.moves, plan.exchanged_dims, boxes_of(from), layout,
                                                  views_of(now, from.local_boxes(coordinate)),
                                                  empty_like_part(now, layout.local_shape(coordinate).sizes));
  return [move, mesh, layout, to] { return redistribute_local(mesh, layout, to, move->finish()); };
}

at::Tensor redistribute_shards(const DeviceMesh& mesh, const MeshLayout& from, const MeshLayout& to,
                               const LocalShardsWrapper& local) {
  const AllShards all(mesh.group(), from.size(), local);
  const MeshRedistribution plan = plan_redistribution(from, all.boxes, to);
  const at::Tensor target = empty_shard(to.local_shape(*mesh.coordinate()).sizes,
                                        at::TensorOptions().dtype(all.dtype).device(mesh.device_type()));
  std::vector<at::Tensor> sources;
  for (const at::Tensor& shard : local.local_shards()) sources.push_back(plain(shard));
  return moved(
      mesh, plan.moves, plan.exchanged_dims,
      [&](std::int64_t place) { return all.boxes[static_cast<std::size_t>(place)]; }, to, std::move(sources), target);
}

at::Tensor distribute_from(std::int64_t rank_of_data, const DeviceMesh& mesh, const MeshLayout& to,
                           const at::Tensor& tensor) {
  const Sizes& coordinate = *mesh.coordinate();
  const std::int64_t mine = mesh_index(mesh.shape(), coordinate);
  const bool is_replicated = std::none_of(to.placements().begin(), to.placements().end(),
                                          [](const Placement& placement) { return placement.is_shard(); });
  at::Tensor local = empty_like_part(tensor, to.local_shape(coordinate).sizes);
  if (tensor.is_meta()) return local;
  if (is_replicated) {
    if (mine == rank_of_data) local.copy_(plain(tensor));
    mesh.group().broadcast(local, static_cast<int>(rank_of_data));
    return local;
  }
  std::vector<MeshMove> moves;
  for (std::int64_t place = 0; place < mesh.size(); ++place) {
    const LocalBoxes boxes = to.local_boxes(mesh_coordinate(mesh.shape(), place));
    for (std::size_t i = 0; i < boxes.size(); ++i) moves.push_back({rank_of_data, place, 0, i, boxes[i].box});
  }
  std::vector<std::size_t> dims(static_cast<std::size_t>(mesh.ndim()));
  std::iota(dims.begin(), dims.end(), std::size_t{0});
  const BoxesOf one_has_all = [&](std::int64_t place) {
    LocalBoxes boxes;
    if (place == rank_of_data) boxes.push_back({Box::full(to.size()), Sizes(to.size().size(), 0)});
    return boxes;
  };
  std::vector<at::Tensor> sources;
  if (mine == rank_of_data) sources.push_back(plain(tensor));
  return moved(mesh, moves, dims, one_has_all, to, std::move(sources), local);
}

}  // namespace tessera
