#include <algorithm>
#include <utility>

#include "tessera/layout/tensor_view.h"

namespace tessera {

Lattice Lattice::of(BoxView box, std::span<const std::int64_t> out_strides) {
  Lattice lattice;
  lattice.base.assign(box.offsets.begin(), box.offsets.end());
  for (std::size_t d = 0; d < box.rank(); ++d) {
    if (box.sizes[d] > 1) lattice.steps.push_back({d, 1, box.sizes[d], out_strides[d]});
  }
  return lattice;
}

std::int64_t Lattice::count() const {
  std::int64_t count = 1;
  for (const Step& step : steps) count *= step.count;
  return count;
}

Box Lattice::bounds() const {
  Box box(base, std::vector<std::int64_t>(base.size(), 1));
  for (const Step& step : steps) box.sizes[step.dim] += step.step * (step.count - 1);
  return box;
}

namespace {

// Returns the part of `lattice` with begin <= k[step] < begin + count.
Lattice part_of(const Lattice& lattice, std::size_t step, std::int64_t begin, std::int64_t count) {
  Lattice part = lattice;
  Lattice::Step& changed = part.steps[step];
  part.base[changed.dim] += begin * changed.step;
  part.out += begin * changed.out_stride;
  changed.count = count;
  return part;
}

// Returns the index of the step in `dim` with the largest distance and more than one element, or nothing.
std::size_t widest_step(const Lattice& lattice, std::size_t dim) {
  std::size_t widest = lattice.steps.size();
  for (std::size_t j = 0; j < lattice.steps.size(); ++j) {
    const Lattice::Step& step = lattice.steps[j];
    if (step.dim != dim || step.count == 1) continue;
    if (widest == lattice.steps.size() || step.step > lattice.steps[widest].step) widest = j;
  }
  return widest;
}

}  // namespace

void split_lattice(Lattice lattice, std::size_t dim, std::int64_t at, std::vector<Lattice>& below,
                   std::vector<Lattice>& above) {
  const std::int64_t first = lattice.base[dim];
  std::int64_t last = first;
  for (const Lattice::Step& step : lattice.steps) {
    if (step.dim == dim) last += step.step * (step.count - 1);
  }
  if (last < at) return below.push_back(std::move(lattice));
  if (first >= at) return above.push_back(std::move(lattice));
  const std::size_t widest = widest_step(lattice, dim);
  const std::int64_t step = lattice.steps[widest].step, count = lattice.steps[widest].count;
  const std::int64_t inner = last - first - step * (count - 1);  // what the other steps add
  const std::int64_t ends_below =
      first + inner < at ? std::min(count, (at - 1 - first - inner) / step + 1) : std::int64_t{0};
  const std::int64_t begins_above = std::min(count, (at - first + step - 1) / step);
  if (ends_below > 0) below.push_back(part_of(lattice, widest, 0, ends_below));
  for (std::int64_t k = ends_below; k < begins_above; ++k) {
    split_lattice(part_of(lattice, widest, k, 1), dim, at, below, above);
  }
  if (begins_above < count) above.push_back(part_of(lattice, widest, begins_above, count - begins_above));
}

LatticeInMemory lattice_in_memory(const Lattice& lattice, std::span<const std::int64_t> origin,
                                  std::span<const std::int64_t> strides) {
  LatticeInMemory result;
  result.out = lattice.out;
  for (std::size_t d = 0; d < lattice.base.size(); ++d) result.first += (lattice.base[d] - origin[d]) * strides[d];
  struct Distance {
    std::int64_t size, stride, out_stride;
  };
  std::vector<Distance> distances;
  for (const Lattice::Step& step : lattice.steps) {
    if (step.count > 1) distances.push_back({step.count, step.step * strides[step.dim], step.out_stride});
  }
  std::stable_sort(distances.begin(), distances.end(),
                   [](const Distance& a, const Distance& b) { return a.stride > b.stride; });
  for (const Distance& inner : distances) {
    if (!result.sizes.empty() && result.strides.back() == inner.stride * inner.size &&
        result.out_strides.back() == inner.out_stride * inner.size) {
      result.sizes.back() *= inner.size;
      result.strides.back() = inner.stride;
      result.out_strides.back() = inner.out_stride;
      continue;
    }
    result.sizes.push_back(inner.size);
    result.strides.push_back(inner.stride);
    result.out_strides.push_back(inner.out_stride);
  }
  return result;
}

}  // namespace tessera
