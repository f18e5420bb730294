#include "tessera/layout/shard_order.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <map>

#include "tessera/base/error.h"

namespace tessera {

namespace {

using MeshDims = std::vector<std::int64_t>;

[[noreturn]] void refuse(std::span<const Placement> placements, const ShardOrder& order, const std::string& why) {
  std::vector<std::string> entries;
  entries.reserve(order.size());
  for (const ShardOrderEntry& entry : order) {
    entries.push_back(fmt::format("{}: [{}]", entry.tensor_dim, fmt::join(entry.mesh_dims, ", ")));
  }
  const std::string text = fmt::format("{{{}}}", fmt::join(entries, ", "));
  fail(ErrorCode::invalid_argument, "shard order {} of placements {}: {}", text, to_string(placements), why);
}

void check(std::span<const Placement> placements, const ShardOrder& order) {
  for (const Placement& placement : placements) {
    if (placement.is_strided()) refuse(placements, order, "expected placements without strided shards");
  }
  ShardOrder sorted = order;
  for (ShardOrderEntry& entry : sorted) std::sort(entry.mesh_dims.begin(), entry.mesh_dims.end());
  if (sorted == default_shard_order(placements)) return;
  refuse(placements, order, "expected the sharded tensor dimensions, ascending, each with the mesh dimensions of it");
}

}  // namespace

ShardOrder default_shard_order(std::span<const Placement> placements) {
  std::map<std::int64_t, MeshDims> by_tensor_dim;
  for (std::size_t m = 0; m < placements.size(); ++m) {
    if (placements[m].is_shard()) by_tensor_dim[placements[m].dim()].push_back(static_cast<std::int64_t>(m));
  }
  ShardOrder order;
  order.reserve(by_tensor_dim.size());
  for (auto& [tensor_dim, mesh_dims] : by_tensor_dim) order.push_back({tensor_dim, std::move(mesh_dims)});
  return order;
}

Placements with_shard_order(std::span<const Placement> placements, const ShardOrder& order,
                            std::span<const std::int64_t> mesh_shape) {
  if (placements.size() != mesh_shape.size()) {
    refuse(placements, order, fmt::format("expected one for each of {} mesh dimensions", mesh_shape.size()));
  }
  check(placements, order);
  Placements result(placements.begin(), placements.end());
  for (const ShardOrderEntry& entry : order) {
    for (auto m = entry.mesh_dims.begin(); m != entry.mesh_dims.end(); ++m) {
      std::int64_t parts = 1;  // into which later mesh dimensions have split before
      for (auto before = entry.mesh_dims.begin(); before != m; ++before) {
        if (*before > *m) parts *= mesh_shape[static_cast<std::size_t>(*before)];
      }
      result[static_cast<std::size_t>(*m)] = Placement::strided_shard(entry.tensor_dim, parts);
    }
  }
  return result;
}

std::optional<ShardOrder> shard_order(std::span<const Placement> placements, std::span<const std::int64_t> mesh_shape) {
  std::map<std::int64_t, MeshDims> by_tensor_dim;
  // From the last mesh dimension: a split factor counts the parts of the later ones that come before.
  for (std::size_t m = placements.size(); m-- > 0;) {
    if (!placements[m].is_shard()) continue;
    MeshDims& dims = by_tensor_dim[placements[m].dim()];
    auto place = dims.begin();
    std::int64_t parts = 1;
    while (parts != placements[m].split_factor() && place != dims.end()) {
      parts *= mesh_shape[static_cast<std::size_t>(*place++)];
    }
    if (parts != placements[m].split_factor()) return std::nullopt;
    dims.insert(place, static_cast<std::int64_t>(m));
  }
  ShardOrder order;
  order.reserve(by_tensor_dim.size());
  for (auto& [tensor_dim, mesh_dims] : by_tensor_dim) order.push_back({tensor_dim, std::move(mesh_dims)});
  return order;
}

std::string to_string(std::span<const Placement> placements, const ShardOrder& order) {
  std::string text;
  for (std::size_t m = 0; m < placements.size(); ++m) {
    text += to_string(placements[m]);
    for (const ShardOrderEntry& entry : order) {
      const auto place = std::find(entry.mesh_dims.begin(), entry.mesh_dims.end(), static_cast<std::int64_t>(m));
      if (place == entry.mesh_dims.end() || entry.mesh_dims.size() == 1) continue;
      text += fmt::format("[{}]", place - entry.mesh_dims.begin());
    }
  }
  return text;
}

}  // namespace tessera
