#pragma once
/// \file
/// Ranks in an n-dimensional array: which of them work together along each dimension.
///
/// A mesh of shape [2, 4] with dimensions "dp" and "tp" has a group of 4 ranks along "tp" for each of the 2 coordinates
/// of "dp", and the other way round. Ranks are those of the group that the mesh was made of, which may have others: one
/// that isn't in the mesh has no coordinate and no groups, and takes part in nothing but making it.
///
/// Laws: the group along a dimension has the ranks in the order of that coordinate, so that its rank is the coordinate;
/// that of the whole mesh has them in row-major order. Groups are made once: a mesh, its copies and its sub-meshes have
/// the same.
///
/// A value; copies are the same mesh. Threads: as the groups. PyTorch: torch/distributed/device_mesh.py.

#include <c10/core/DeviceType.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/comm/process_group.h"

namespace tessera {

class DeviceMesh {
 public:
  /// This process alone, in one dimension.
  DeviceMesh();
  /// The ranks of `group`, row-major: the rank at a coordinate is its index.
  /// A collective of `group`. Throws `Error(invalid_argument)` unless the mesh has as many places as the group ranks,
  /// and there are no names or one for each dimension, none empty or twice.
  DeviceMesh(const ProcessGroup& group, std::vector<std::int64_t> shape, std::vector<std::string> dim_names = {},
             c10::DeviceType device_type = c10::DeviceType::CPU);
  /// `ranks` of `group`, row-major, each at most once; not all need be there. Otherwise as above.
  static DeviceMesh of_ranks(const ProcessGroup& group, std::vector<std::int64_t> shape, std::vector<int> ranks,
                             std::vector<std::string> dim_names = {},
                             c10::DeviceType device_type = c10::DeviceType::CPU);

  std::int64_t ndim() const { return static_cast<std::int64_t>(shape().size()); }
  const std::vector<std::int64_t>& shape() const;
  /// How many ranks are in it.
  std::int64_t size() const;
  std::int64_t size(std::int64_t dim) const;
  /// Row-major.
  const std::vector<int>& ranks() const;
  /// Empty if the dimensions have no names.
  const std::vector<std::string>& dim_names() const;
  c10::DeviceType device_type() const;
  /// The dimension of this name. Throws `Error(invalid_argument)` that says which there are.
  std::int64_t dim(std::string_view name) const;

  /// Of this rank; nothing if it isn't in the mesh.
  const std::optional<std::vector<std::int64_t>>& coordinate() const;
  bool has_this_rank() const { return coordinate().has_value(); }
  /// This rank's coordinate in a dimension. These throw `Error(invalid_argument)` where this rank isn't in the mesh.
  std::int64_t local_rank(std::int64_t dim = 0) const;
  /// The ranks that differ from this one in `dim` alone.
  const ProcessGroup& group(std::int64_t dim) const;
  const ProcessGroup& group(std::string_view name) const { return group(dim(name)); }
  /// All ranks of the mesh.
  const ProcessGroup& group() const;

  /// The mesh of these dimensions, in the order in which this one has them, that this rank is in: all ranks that differ
  /// from it in these alone. On a rank that isn't in this mesh, one that it isn't in either. The first time, with
  /// several dimensions but not all, a collective of the group that the first mesh was made of.
  /// Throws `Error(invalid_argument)` for names that aren't there, come twice, or in another order.
  DeviceMesh operator[](std::string_view name) const;
  DeviceMesh submesh(std::span<const std::string> names) const;
  DeviceMesh submesh(std::initializer_list<std::string> names) const;
  /// These dimensions as one, of name `name`. PyTorch: `_flatten`.
  DeviceMesh flattened(std::string name) const;

  /// "DeviceMesh(dp=2, tp=4)", "DeviceMesh(2, 4)"
  std::string to_string() const;
  /// Whether both have the same ranks at the same places, of the same names, on the same kind of device.
  bool operator==(const DeviceMesh& other) const;

 private:
  struct State;
  explicit DeviceMesh(std::shared_ptr<const State> state) : state_(std::move(state)) {}
  std::shared_ptr<const State> state_;
};

}  // namespace tessera
