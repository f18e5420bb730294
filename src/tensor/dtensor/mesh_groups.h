#pragma once
// The groups of a mesh in which a rank may wait for another.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "tessera/tensor/device_mesh.h"

namespace tessera {

// Adds the groups of the mesh that this rank is in and that are not in `groups` yet: that of all ranks, those along
// each dimension, and those along several. Adds none outside of the mesh. A part of a step on the mesh is left in all
// of them: another rank may wait in any.
inline void add_groups_of(const DeviceMesh& mesh, std::vector<ProcessGroup>& groups) {
  if (!mesh.has_this_rank()) return;
  const auto add = [&](const ProcessGroup& group) {
    if (std::find(groups.begin(), groups.end(), group) == groups.end()) groups.push_back(group);
  };
  add(mesh.group());
  for (std::uint64_t chosen = 1; chosen < std::uint64_t{1} << mesh.ndim(); ++chosen) {
    std::vector<std::int64_t> dims;
    for (std::int64_t d = 0; d < mesh.ndim(); ++d) {
      if ((chosen >> d & 1) != 0) dims.push_back(d);
    }
    if (const ProcessGroup* group = mesh.find_group(dims)) add(*group);
  }
}

inline std::vector<ProcessGroup> groups_of(const DeviceMesh& mesh) {
  std::vector<ProcessGroup> groups;
  add_groups_of(mesh, groups);
  return groups;
}

}  // namespace tessera
