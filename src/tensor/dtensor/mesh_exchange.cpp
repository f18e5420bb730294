#include "tensor/dtensor/mesh_exchange.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full_like.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <numeric>
#include <optional>
#include <utility>

#include "tensor/dtensor/differentiable.h"
#include "tensor/dtensor/rank_redistribution.h"
#include "tensor/exchange/box_copy.h"
#include "tensor/exchange/exchange.h"
#include "tensor/exchange/reduce.h"
#include "tessera/base/bytes.h"
#include "tessera/base/error.h"
#include "tessera/layout/internal/exchange_size.h"
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

// Fills `local`, this rank's local tensor after the moves. `sources` are its tensors of the boxes before.
at::Tensor moved(const DeviceMesh& mesh, const RankRedistribution& plan, std::vector<at::Tensor> sources,
                 const at::Tensor& local) {
  for (at::Tensor& source : sources) source = source.contiguous();
  const ProcessGroup group = plan.exchange_group(mesh);
  const Target target(local, plan.gets);
  exchange({group, plan.exchange, sources, target.tensors(), local.scalar_type(), local.device(), local.is_cpu()}, {});
  target.finish();
  return local;
}

// As `moved`, with one all-to-all that runs until `finish`.
class StartedMove {
 public:
  StartedMove(const DeviceMesh& mesh, std::shared_ptr<const RankRedistribution> plan, std::vector<at::Tensor> sources,
              at::Tensor local)
      : plan_(std::move(plan)),
        group_(plan_->exchange_group(mesh)),
        target_(local, plan_->gets),
        sources_(std::move(sources)),
        local_(std::move(local)) {
    for (at::Tensor& source : sources_) source = source.contiguous();
    const Exchange parts = all_parts();
    const std::vector<std::int64_t> sent = splits(true), received = splits(false);
    const at::Tensor in = at::empty({total(sent)}, local_.options());
    received_ = at::empty({total(received)}, local_.options());
    each_move(true, [&](const Move& move, std::int64_t begin) {
      const at::Tensor packed = in.narrow(0, begin, volume(move.box)).view(move.box.sizes);
      copy_elements(packed, parts.taken(move, move.box));
    });
    pending_ = group_.start_all_to_all(received_, in, received, sent);
    parts.copy_what_stays();
  }

  at::Tensor finish() {
    pending_.wait();
    const Exchange parts = all_parts();
    each_move(false, [&](const Move& move, std::int64_t begin) {
      const at::Tensor packed = received_.narrow(0, begin, volume(move.box)).view(move.box.sizes);
      copy_elements(parts.given(move, move.box), packed);
    });
    target_.finish();
    return local_;
  }

 private:
  Exchange all_parts() const {
    return {group_,          plan_->exchange, sources_, target_.tensors(), local_.scalar_type(),
            local_.device(), local_.is_cpu()};
  }
  // Visits what this rank sends to others, or gets from them, in the plan's order, which is by the other rank. `f` gets
  // the place of a move's first element among all of them.
  template <typename F>
  void each_move(bool sends, const F& f) const {
    std::int64_t begin = 0;
    for (const Move& move : plan_->exchange.moves) {
      if (move.source_rank == move.destination_rank || (move.source_rank == group_.rank()) != sends) continue;
      f(move, begin);
      begin += volume(move.box);
    }
  }
  std::vector<std::int64_t> splits(bool sends) const {
    std::vector<std::int64_t> elements(static_cast<std::size_t>(group_.size()), 0);
    each_move(sends, [&](const Move& move, std::int64_t) {
      elements[static_cast<std::size_t>(sends ? move.destination_rank : move.source_rank)] += volume(move.box);
    });
    return elements;
  }
  static std::int64_t total(const std::vector<std::int64_t>& elements) {
    return std::accumulate(elements.begin(), elements.end(), std::int64_t{0});
  }

  std::shared_ptr<const RankRedistribution> plan_;
  ProcessGroup group_;
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
  std::optional<at::ScalarType> dtype;  // nullopt if no rank has a shard

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
  const Sizes& coordinate = *mesh.coordinate();
  const std::shared_ptr<const RankRedistribution> plan = redistribution_of(from, to, coordinate);
  at::Tensor now = plain(local);
  for (const MeshReduction& step : plan->steps.reductions) {
    const ProcessGroup& group = mesh.group(static_cast<std::int64_t>(step.mesh_dim));
    const ReduceOp op = from.placements()[step.mesh_dim].reduce_op();
    now = step.to.is_replicate() ? all_reduced(group, now, op) : reduce_scattered(group, now, op, step.to.dim());
  }
  MeshLayout layout(from.size(), from.mesh_shape(), plan->steps.moved);
  const Sizes size = layout.local_shape(coordinate).sizes;
  if (!plan->steps.exchanged_dims.empty() || plan->has != plan->gets || now.sizes() != at::IntArrayRef(size))
    now = moved(mesh, *plan, views_of(now, plan->has), empty_like_part(now, size));
  for (const std::size_t m : plan->steps.partial_dims) {
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
    const MeshRedistribution& rest = redistribution_of(now, to, *mesh.coordinate())->steps;
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
  const Sizes& coordinate = *mesh.coordinate();
  const std::shared_ptr<const RankRedistribution> plan = redistribution_of(from, to, coordinate);
  if (!plan->steps.reductions.empty()) {
    const MeshReduction& step = plan->steps.reductions[0];
    Placements placements = from.placements();
    const ReduceOp op = placements[step.mesh_dim].reduce_op();
    placements[step.mesh_dim] = step.to;
    const MeshLayout now(from.size(), from.mesh_shape(), std::move(placements));
    const auto finish = reduced(mesh.group(static_cast<std::int64_t>(step.mesh_dim)), plain(local), op, step.to);
    if (!only_local_steps(now)) return start_redistribute_local(mesh, now, to, finish());
    return [finish, mesh, now, to] { return redistribute_local(mesh, now, to, finish()); };
  }
  const MeshLayout layout(from.size(), from.mesh_shape(), plan->steps.moved);
  const at::Tensor now = plain(local);
  const auto move = std::make_shared<StartedMove>(mesh, plan, views_of(now, plan->has),
                                                  empty_like_part(now, layout.local_shape(coordinate).sizes));
  return [move, mesh, layout, to] { return redistribute_local(mesh, layout, to, move->finish()); };
}

at::Tensor redistribute_shards(const DeviceMesh& mesh, const MeshLayout& from, const MeshLayout& to,
                               const LocalShardsWrapper& local, at::ScalarType dtype) {
  const MeshLayout moved_to = gradient_of(to);  // shards move to dimensions that become partial after
  const AllShards all(mesh.group(), from.size(), local);
  const Sizes& coordinate = *mesh.coordinate();
  const std::int64_t mine = mesh_index(mesh.shape(), coordinate);
  const RankRedistribution plan(plan_redistribution(from, all.boxes, moved_to),
                                all.boxes[static_cast<std::size_t>(mine)], moved_to.local_boxes(coordinate),
                                mesh.shape(), mine);
  const at::Tensor target =
      empty_shard(moved_to.local_shape(coordinate).sizes,
                  at::TensorOptions().dtype(all.dtype.value_or(dtype)).device(mesh.device_type()));
  std::vector<at::Tensor> sources;
  for (const at::Tensor& shard : local.local_shards()) sources.push_back(plain(shard));
  return redistribute_local(mesh, moved_to, to, moved(mesh, plan, std::move(sources), target));
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
  const Box full = Box::full(to.size());
  MeshRedistribution plan;
  ExchangeSizeSum sum;
  for (std::int64_t place = 0; place < mesh.size(); ++place) {
    const LocalBoxes boxes = to.local_boxes(mesh_coordinate(mesh.shape(), place));
    for (std::size_t i = 0; i < boxes.size(); ++i) {
      sum.add(rank_of_data, place, boxes[i].box, full, boxes[i].box);
      plan.moves.push_back({rank_of_data, place, 0, i, boxes[i].box, full});
    }
  }
  const ExchangeSize size = sum.total();
  plan.moved_elements = size.sent;
  plan.largest_message = size.largest_message;
  plan.run_length = size.run_length;
  plan.exchanged_dims.resize(static_cast<std::size_t>(mesh.ndim()));
  std::iota(plan.exchanged_dims.begin(), plan.exchanged_dims.end(), std::size_t{0});
  LocalBoxes has;
  std::vector<at::Tensor> sources;
  if (mine == rank_of_data) {
    has.push_back({full, Sizes(to.size().size(), 0)});
    sources.push_back(plain(tensor));
  }
  return moved(mesh,
               RankRedistribution(std::move(plan), std::move(has), to.local_boxes(coordinate), mesh.shape(), mine),
               std::move(sources), local);
}

}  // namespace tessera
