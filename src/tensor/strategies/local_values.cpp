#include "tensor/strategies/local_values.h"

#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include "tessera/layout/mesh_layout.h"
#include "tessera/tensor/internal/box_view.h"

namespace tessera {

namespace {

bool is_inexact(at::ScalarType type) { return at::isFloatingType(type) || at::isComplexType(type); }

// Returns the sum of each element's indices: it alternates along every dimension.
at::Tensor checkerboard(const at::Tensor& like) {
  at::Tensor sums = at::zeros(like.sizes(), like.options().dtype(at::kLong));
  for (std::int64_t d = 0; d < like.dim(); ++d) {
    std::vector<std::int64_t> size(static_cast<std::size_t>(like.dim()), 1);
    size[static_cast<std::size_t>(d)] = like.size(d);
    sums = sums + at::arange(like.size(d), sums.options()).view(size);
  }
  return sums;
}

// Returns the difference of the greatest and the least finite element.
double range_of(const at::Tensor& full) {
  const at::Tensor finite = full.masked_select(at::isfinite(full)).to(at::kDouble);
  return finite.numel() == 0 ? 0 : (finite.max() - finite.min()).item<double>();
}

// What a rank has of an element, by how the elements alternate.
struct Alternation {
  at::Tensor signs;      // 1 or -1, of the tensor's dtype
  at::Tensor is_holder;  // of a kind of partial tensor of which one rank has the value
  at::Tensor is_far;     // whether the others have a value that is out of the range of all elements, or a near one
};

Alternation alternation(const at::Tensor& full, std::int64_t ranks, std::int64_t rank, std::size_t input) {
  const at::Tensor board = checkerboard(full) + static_cast<std::int64_t>(input);
  return {(1 - 2 * board.remainder(2)).to(full.scalar_type()), board.remainder(ranks).eq(rank),
          board.remainder(2 * ranks).ge(ranks)};
}

// Parts of different sizes, some of the other sign: a function that is not linear gives other sums.
at::Tensor summand(const at::Tensor& full, std::int64_t ranks, std::int64_t rank, std::size_t input) {
  const at::Tensor signs = alternation(full, ranks, rank, input).signs;
  const auto others = static_cast<double>(ranks - 1);
  if (!is_inexact(full.scalar_type())) {
    const at::Tensor noise = signs * static_cast<std::int64_t>(input + 2);
    return rank == 0 ? full - noise * (ranks - 1) : noise;
  }
  const double first = 0.6 + 0.1 * static_cast<double>(input % 3), weight = rank == 0 ? first : (1 - first) / others;
  const double range = at::isComplexType(full.scalar_type()) ? 1 : range_of(full);
  const at::Tensor noise = signs * ((1 + range) * (1 + 0.37 * static_cast<double>(input)));
  return full * weight + noise * (rank == 0 ? -others : 1.0);
}

// One rank has the element, and the others have lesser ones (for a maximum): in part by little, so that functions that
// are not monotonic differ, and in part by more than the range of the tensor.
at::Tensor extreme_part(const at::Tensor& full, const Placement& placement, std::int64_t ranks, std::int64_t rank,
                        std::size_t input) {
  const double side = placement.reduce_op() == ReduceOp::max ? -1 : 1;
  const bool is_exact = !is_inexact(full.scalar_type());
  const double near = is_exact ? 1 : 0.3 + 0.1 * static_cast<double>(rank) + 0.17 * static_cast<double>(input);
  const double far = range_of(full) + 1 + near + static_cast<double>(rank);
  const auto [signs, is_holder, is_far] = alternation(full, ranks, rank, input);
  const auto moved = [&](double by) {
    if (!is_exact) return full + side * by;
    at::Tensor wide = full.to(at::kLong) + static_cast<std::int64_t>(side * by);
    if (full.element_size() == 8) return wide;
    const auto highest = (std::int64_t{1} << (8 * full.element_size() - 1)) - 1;
    return wide.clamp(-highest - 1, highest).to(full.scalar_type());
  };
  return at::where(is_holder, full, at::where(is_far, moved(far), moved(near)));
}

// One rank has the element, divided by the factors of the others.
at::Tensor factor(const at::Tensor& full, std::int64_t ranks, std::int64_t rank, std::size_t input) {
  const auto [signs, is_holder, is_far] = alternation(full, ranks, rank, input);
  if (!is_inexact(full.scalar_type())) return at::where(is_holder, ranks % 2 == 0 ? full * signs : full, signs);
  const at::Tensor others = signs * (input % 2 == 0 ? 2.0 : 0.5);
  at::Tensor held = full;
  for (std::int64_t r = 1; r < ranks; ++r) held = held / others;
  return at::where(is_holder, held, others);
}

at::Tensor reduced(const at::Tensor& all, ReduceOp op) {
  switch (op) {
    case ReduceOp::sum:
      return all.sum(0);
    case ReduceOp::average:
      return all.mean(0);
    case ReduceOp::product:
      return all.prod(0);
    case ReduceOp::min:
      return all.amin(0);
    case ReduceOp::max:
      return all.amax(0);
  }
  return {};
}

// Returns the elements of a shard.
at::Tensor shard_of(const at::Tensor& full, const Placement& shard, std::int64_t ranks, std::int64_t rank) {
  const MeshLayout layout(full.sizes().vec(), {ranks}, {shard});
  const std::vector<std::int64_t> coordinate = {rank};
  at::Tensor part = at::empty(layout.local_shape(coordinate).sizes, full.options());
  for (const LocalBox& box : layout.local_boxes(coordinate))
    box_view(part, {box.local_offsets, box.box.sizes}).copy_(box_view(full, box.box));
  return part;
}

std::optional<std::string> difference(const at::Tensor& expected, const at::Tensor& found, const Tolerance& tolerance) {
  if (expected.sizes() != found.sizes()) {
    return fmt::format("a local result has size [{}], expected [{}]", fmt::join(found.sizes(), ", "),
                       fmt::join(expected.sizes(), ", "));
  }
  if (expected.scalar_type() != found.scalar_type()) {
    return fmt::format("a local result has dtype {}, expected {}", c10::toString(found.scalar_type()),
                       c10::toString(expected.scalar_type()));
  }
  if (!is_inexact(expected.scalar_type()))
    return at::equal(expected, found) ? std::nullopt : std::optional<std::string>("the result differs");
  if (at::allclose(found, expected, tolerance.relative, tolerance.absolute, /*equal_nan=*/true)) return std::nullopt;
  return fmt::format("the result differs by {:.3g} at most", (found - expected).abs().max().item<double>());
}

}  // namespace

Placements placements_to_try(const at::Tensor& full) {
  Placements placements = {Placement::replicate()};
  for (std::int64_t d = 0; d < full.dim(); ++d) {
    if (full.size(d) > 1) placements.push_back(Placement::shard(d));
  }
  if (full.scalar_type() == at::kBool || full.scalar_type() == at::kByte) return placements;
  for (const ReduceOp op : {ReduceOp::sum, ReduceOp::average, ReduceOp::min, ReduceOp::max, ReduceOp::product}) {
    const bool orders = op == ReduceOp::min || op == ReduceOp::max;
    if (!orders || !at::isComplexType(full.scalar_type())) placements.push_back(Placement::partial(op));
  }
  return placements;
}

at::Tensor local_value(const at::Tensor& full, const Placement& placement, std::int64_t ranks, std::int64_t rank,
                       std::size_t input) {
  if (placement.is_replicate()) return full.clone();
  if (placement.is_shard()) return shard_of(full, placement, ranks, rank);
  switch (placement.reduce_op()) {
    case ReduceOp::sum:
      return summand(full, ranks, rank, input);
    case ReduceOp::average:
      return summand(full, ranks, rank, input) * ranks;
    case ReduceOp::product:
      return factor(full, ranks, rank, input);
    case ReduceOp::min:
    case ReduceOp::max:
      return extreme_part(full, placement, ranks, rank, input);
  }
  return full.clone();
}

std::optional<std::string> difference(const at::Tensor& full, const Placement& placement,
                                      const std::vector<at::Tensor>& locals, const Tolerance& tolerance) {
  const auto ranks = static_cast<std::int64_t>(locals.size());
  if (placement.is_partial()) {
    if (full.scalar_type() == at::kBool) return "a tensor of bools is not partial";
    for (const at::Tensor& local : locals) {
      if (local.sizes() != full.sizes()) return difference(full, local, tolerance);
    }
    const at::ScalarType wide = at::isComplexType(full.scalar_type()) ? at::kComplexDouble : at::kDouble;
    return difference(full.to(wide), reduced(at::stack(locals).to(wide), placement.reduce_op()), tolerance);
  }
  for (std::int64_t rank = 0; rank < ranks; ++rank) {
    const at::Tensor expected = placement.is_shard() ? shard_of(full, placement, ranks, rank) : full;
    if (auto found = difference(expected, locals[static_cast<std::size_t>(rank)], tolerance)) return found;
  }
  return std::nullopt;
}

}  // namespace tessera
