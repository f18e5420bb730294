#include "layout/view/reshape.h"

#include <algorithm>
#include <utility>

#include "tessera/base/function_ref.h"
#include "tessera/layout/byte_ranges.h"
#include "tessera/layout/flat_interval.h"

namespace tessera {
namespace {

std::int64_t product(std::span<const std::int64_t> sizes) {
  std::int64_t result = 1;
  for (const std::int64_t size : sizes) result *= size;
  return result;
}

// Divides the indices of dimension `flat` by `block`: calls f with lattices that have the quotient in dimension
// `quotient`, which was 0, and the remainder in `flat`. A lattice may have indices of the same remainder in several
// blocks at once, but not a step that leaves a block in the middle; where there is one, the lattice is divided.
template <typename F>
void divide(Lattice all, std::size_t flat, std::size_t quotient, std::int64_t block, const F& f) {
  std::vector<Lattice> open;
  open.push_back(std::move(all));
  while (!open.empty()) {
    Lattice lattice = std::move(open.back());
    open.pop_back();
    const std::int64_t begin = lattice.base[flat] % block;
    std::int64_t span = 0;  // of the steps that are no multiple of a block
    std::size_t widest = lattice.steps.size();
    for (std::size_t j = 0; j < lattice.steps.size(); ++j) {
      const Lattice::Step& step = lattice.steps[j];
      if (step.dim != flat || step.step % block == 0 || step.count == 1) continue;
      span += step.step * (step.count - 1);
      if (widest == lattice.steps.size() || step.step > lattice.steps[widest].step) widest = j;
    }
    if (begin + span < block) {
      lattice.base[quotient] = lattice.base[flat] / block;
      lattice.base[flat] = begin;
      for (Lattice::Step& step : lattice.steps) {
        if (step.dim != flat || step.step % block != 0) continue;
        step.dim = quotient;
        step.step /= block;
      }
      f(lattice);
      continue;
    }
    const Lattice::Step step = lattice.steps[widest];
    const std::int64_t inner = span - step.step * (step.count - 1);
    const auto add_part = [&](std::int64_t first, std::int64_t count) {
      if (count == 0) return;
      Lattice part = lattice;
      part.base[flat] += first * step.step;
      part.out += first * step.out_stride;
      part.steps[widest].count = count;
      open.push_back(std::move(part));
    };
    const std::int64_t within = begin % step.step;
    if (block % step.step == 0 && within + inner < step.step) {
      // Full blocks become a step of their own; what is before the first one and after the last one is apart.
      const std::int64_t per_block = block / step.step;
      const std::int64_t head = begin == within ? 0 : std::min(step.count, per_block - (begin - within) / step.step);
      const std::int64_t blocks = (step.count - head) / per_block;
      add_part(0, head);
      add_part(head + blocks * per_block, (step.count - head) % per_block);
      if (blocks == 0) continue;
      Lattice full = lattice;
      full.base[flat] += head * step.step;
      full.out += head * step.out_stride;
      full.steps[widest].count = per_block;
      full.steps.push_back({flat, block, blocks, step.out_stride * per_block});
      open.push_back(std::move(full));
      continue;
    }
    const std::int64_t fitting = begin + inner < block ? (block - 1 - begin - inner) / step.step + 1 : std::int64_t{1};
    add_part(fitting, step.count - fitting);
    add_part(0, fitting);
  }
}

}  // namespace

std::vector<ReshapeGroup> reshape_groups(std::span<const std::int64_t> from, std::span<const std::int64_t> to) {
  std::vector<ReshapeGroup> groups;
  for (std::size_t i = 0, j = 0; i < from.size() || j < to.size();) {
    ReshapeGroup group{i, i, j, j};
    std::int64_t in = 1, out = 1;
    if (i < from.size()) in = from[i++];
    if (j < to.size()) out = to[j++];
    while (in != out) {
      if (in < out) {
        in *= from[i++];
      } else {
        out *= to[j++];
      }
    }
    group.from_end = i;
    group.to_end = j;
    groups.push_back(group);
  }
  return groups;
}

void reshape_lattice(const Lattice& lattice, std::span<const std::int64_t> from, std::span<const std::int64_t> to,
                     std::span<const ReshapeGroup> groups, FunctionRef<void(const Lattice&)> f) {
  // Flat indices of a group are in the last of its dimensions until they are divided.
  Lattice start;
  start.out = lattice.out;
  start.base.assign(to.size(), 0);
  struct Division {
    std::size_t flat, quotient;
    std::int64_t block;
  };
  std::vector<Division> divisions;
  for (const ReshapeGroup& group : groups) {
    if (group.to_begin == group.to_end) continue;
    const std::size_t flat = group.to_end - 1;
    const std::vector<std::int64_t> strides =
        row_major_strides(from.subspan(group.from_begin, group.from_end - group.from_begin));
    for (std::size_t d = group.from_begin; d < group.from_end; ++d) {
      start.base[flat] += lattice.base[d] * strides[d - group.from_begin];
    }
    for (const Lattice::Step& step : lattice.steps) {
      if (step.dim < group.from_begin || step.dim >= group.from_end) continue;
      start.steps.push_back({flat, step.step * strides[step.dim - group.from_begin], step.count, step.out_stride});
    }
    for (std::size_t d = group.to_begin; d < flat; ++d) {
      divisions.push_back({flat, d, product(to.subspan(d + 1, group.to_end - d - 1))});
    }
  }
  const std::function<void(const Lattice&, std::size_t)> carry_out = [&](const Lattice& part, std::size_t next) {
    if (next == divisions.size()) return f(part);
    const Division& division = divisions[next];
    divide(part, division.flat, division.quotient, division.block,
           [&](const Lattice& divided) { carry_out(divided, next + 1); });
  };
  carry_out(start, 0);
}

std::optional<std::vector<Box>> reshape_box(BoxView box, std::span<const std::int64_t> from,
                                            std::span<const std::int64_t> to) {
  if (product(from) == 0) return std::vector{Box::full(to)};
  if (is_empty(box)) return std::vector<Box>();
  std::vector<Box> result = {Box::full(to)};
  for (const ReshapeGroup& group : reshape_groups(from, to)) {
    const std::size_t dims = group.from_end - group.from_begin;
    const auto sizes = from.subspan(group.from_begin, dims);
    const BoxView part = {box.offsets.subspan(group.from_begin, dims), box.sizes.subspan(group.from_begin, dims)};
    if (!is_contiguous_in(part, Box::full(sizes))) return std::nullopt;
    const std::vector<std::int64_t> strides = row_major_strides(sizes);
    std::int64_t begin = 0;
    for (std::size_t d = 0; d < dims; ++d) begin += part.offsets[d] * strides[d];
    const std::vector<Box> pieces =
        boxes_of_flat_interval(to.subspan(group.to_begin, group.to_end - group.to_begin), begin, begin + volume(part));
    std::vector<Box> with_pieces;
    for (const Box& before : result) {
      for (const Box& piece : pieces) {
        Box& combined = with_pieces.emplace_back(before);
        std::ranges::copy(piece.offsets, combined.offsets.begin() + static_cast<std::ptrdiff_t>(group.to_begin));
        std::ranges::copy(piece.sizes, combined.sizes.begin() + static_cast<std::ptrdiff_t>(group.to_begin));
      }
    }
    result = std::move(with_pieces);
  }
  return result;
}

}  // namespace tessera
