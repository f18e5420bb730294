#pragma once
// Reshapes as groups of dimensions.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "tessera/base/function_ref.h"
#include "tessera/layout/tensor_view.h"

namespace tessera {

// Consecutive dimensions [from_begin, from_end) of one shape that have as many elements as the dimensions
// [to_begin, to_end) of another. Either may be none, which is one element.
struct ReshapeGroup {
  std::size_t from_begin = 0, from_end = 0, to_begin = 0, to_end = 0;
};

// Returns the smallest such groups of two shapes with as many elements, at least one.
std::vector<ReshapeGroup> reshape_groups(std::span<const std::int64_t> from, std::span<const std::int64_t> to);

// Calls f with lattices of a tensor of shape `to` that have the elements of a lattice of one of shape `from`.
void reshape_lattice(const Lattice& lattice, std::span<const std::int64_t> from, std::span<const std::int64_t> to,
                     std::span<const ReshapeGroup> groups, FunctionRef<void(const Lattice&)> f);

}  // namespace tessera
