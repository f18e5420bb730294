#pragma once
// Cases for tests of tensors on meshes: placements, and the elements of boxes.

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "tessera/base/function_ref.h"
#include "tessera/layout/box.h"
#include "tessera/layout/placement.h"
#include "tessera/layout/placements.h"

namespace tessera::testing {

using Sizes = std::vector<std::int64_t>;

inline const Placement R = Placement::replicate(), S0 = Placement::shard(0), S1 = Placement::shard(1),
                       P = Placement::partial();

// Returns "Mesh23" for a mesh [2, 3], as the name of a case.
inline std::string mesh_name(const Sizes& shape) {
  std::string name = "Mesh";
  for (const std::int64_t length : shape) name += std::to_string(length);
  return name;
}

// Returns every way to choose one placement for each mesh dimension, without those that mix kinds of partial tensors.
inline std::vector<Placements> cross(const Placements& choices, std::size_t mesh_dims) {
  std::vector<Placements> all = {{}};
  for (std::size_t m = 0; m < mesh_dims; ++m) {
    std::vector<Placements> longer;
    for (const Placements& placements : all) {
      for (const Placement& choice : choices) {
        longer.push_back(placements);
        longer.back().push_back(choice);
        if (mixes_partials(longer.back())) longer.pop_back();
      }
    }
    all = std::move(longer);
  }
  return all;
}

// Visits all indices in a box, in row-major order.
inline void each_index(BoxView box, FunctionRef<void(const Sizes&)> f) {
  Sizes index(box.offsets.begin(), box.offsets.end());
  for (std::int64_t n = volume(box); n > 0; --n) {
    f(index);
    for (std::size_t d = box.rank(); d-- > 0;) {
      if (++index[d] < box.offsets[d] + box.sizes[d]) break;
      index[d] = box.offsets[d];
    }
  }
}

}  // namespace tessera::testing
