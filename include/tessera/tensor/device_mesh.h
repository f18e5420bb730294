#pragma once
/// \file
/// An n-dimensional array of ranks, with a process group along each dimension.
///
/// A mesh of shape [2, 4] with dimensions "dp" and "tp" has a group of 4 ranks along "tp" for each of the 2 coordinates
/// of "dp", and a group of 2 ranks along "dp" for each of the 4 coordinates of "tp". Ranks are numbered as in the group
/// that the mesh was made from. That group may have more ranks: a rank outside of the mesh has no coordinate and no
/// groups, and takes part only in creating the mesh.
///
/// Laws: the group along a dimension orders its ranks by coordinate, so a rank's number in it is its coordinate. The
/// group of all ranks of the mesh orders them row-major. Groups are created once; a mesh, its copies and its sub-meshes
/// share them.
///
/// A value; copies are the same mesh. Threads: as for the groups. PyTorch: torch/distributed/device_mesh.py.

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
  /// Creates a 1-D mesh of this process alone.
  DeviceMesh();
  /// Creates a mesh of all ranks of `group` in row-major order. A collective of `group`. Throws
  /// `Error(invalid_argument)` unless the product of `shape` is the group's size and `dim_names` is empty or has a
  /// distinct, nonempty name for each dimension.
  DeviceMesh(const ProcessGroup& group, std::vector<std::int64_t> shape, std::vector<std::string> dim_names = {},
             c10::DeviceType device_type = c10::DeviceType::CPU);
  /// Creates a mesh of `ranks` of `group` in row-major order, each at most once; some ranks may be left out. Otherwise
  /// as above.
  static DeviceMesh of_ranks(const ProcessGroup& group, std::vector<std::int64_t> shape, std::vector<int> ranks,
                             std::vector<std::string> dim_names = {},
                             c10::DeviceType device_type = c10::DeviceType::CPU);

  /// Creates a 1-D mesh of all ranks of `group`, in its order, whose group is `group`: none is created. A collective of
  /// `group`. Throws as the constructor.
  static DeviceMesh from_group(const ProcessGroup& group, std::vector<std::string> dim_names = {},
                               c10::DeviceType device_type = c10::DeviceType::CPU);
  /// Creates a mesh of `ranks` of `group` in row-major order, as `of_ranks`, from existing groups: `dim_groups[d]` is
  /// this rank's group along dimension d. Creates at most one group, that of all ranks of the mesh, and only if the
  /// mesh has several dimensions and is not all of `group` in its order. A collective of `group`, which is implicit in
  /// PyTorch (the default group). Ranks outside of the mesh pass no `dim_groups`.
  ///
  /// Every rank throws `Error(invalid_argument)` as `of_ranks` does, and if `dim_names` is empty, or on any rank there
  /// is not one group for each dimension, or a group's ranks are not those of the mesh along its dimension, in order,
  /// or ranks along a dimension pass different groups. PyTorch checks the number of groups only. PyTorch: from_group
  /// with a list.
  static DeviceMesh from_groups(const ProcessGroup& group, const std::vector<ProcessGroup>& dim_groups,
                                std::vector<std::int64_t> shape, std::vector<int> ranks,
                                std::vector<std::string> dim_names, c10::DeviceType device_type = c10::DeviceType::CPU);

  std::int64_t ndim() const { return static_cast<std::int64_t>(shape().size()); }
  const std::vector<std::int64_t>& shape() const;
  /// Returns the number of ranks.
  std::int64_t size() const;
  /// Returns the number of ranks along `dim`. Throws `Error(invalid_argument)` for a dimension that the mesh does not
  /// have, as do `local_rank` and `group`.
  std::int64_t size(std::int64_t dim) const;
  /// Returns the ranks in row-major order.
  const std::vector<int>& ranks() const;
  /// Returns the names of the dimensions; empty if they have none.
  const std::vector<std::string>& dim_names() const;
  c10::DeviceType device_type() const;
  /// Returns the dimension of this name. Throws `Error(invalid_argument)` listing the names if there is none.
  std::int64_t dim(std::string_view name) const;

  /// Returns this rank's coordinate; nullopt outside of the mesh.
  const std::optional<std::vector<std::int64_t>>& coordinate() const;
  bool has_this_rank() const { return coordinate().has_value(); }
  /// Returns this rank's coordinate in `dim`. This and `group` throw `Error(invalid_argument)` outside of the mesh.
  std::int64_t local_rank(std::int64_t dim = 0) const;
  /// Returns the group of the ranks whose coordinate differs from this rank's only in `dim`.
  const ProcessGroup& group(std::int64_t dim) const;
  const ProcessGroup& group(std::string_view name) const { return group(dim(name)); }
  /// Returns the group of all ranks of the mesh.
  const ProcessGroup& group() const;
  /// Returns the group of the ranks whose coordinates differ from this rank's only in `dims`, ascending, if there is
  /// one: along one dimension, along all, or along those of a sub-mesh that was made before. Returns null otherwise,
  /// and outside of the mesh. Throws `Error(invalid_argument)` for a dimension that the mesh does not have.
  const ProcessGroup* find_group(std::span<const std::int64_t> dims) const;

  /// Returns the sub-mesh along these dimensions that this rank is in: the ranks whose coordinates differ from this
  /// rank's only in them. On a rank outside of this mesh, the result does not contain the rank either. A call with
  /// several but not all dimensions is a collective of the group that the original mesh was made from. Throws
  /// `Error(invalid_argument)` for names that are unknown, duplicate, or not in the order of this mesh.
  DeviceMesh operator[](std::string_view name) const;
  DeviceMesh submesh(std::span<const std::string> names) const;
  DeviceMesh submesh(std::initializer_list<std::string> names) const;
  /// Returns a 1-D mesh of all ranks, whose dimension is called `name`. Throws `Error(invalid_argument)` for an empty
  /// name. PyTorch: `_flatten`.
  DeviceMesh flattened(std::string name) const;

  /// Returns "DeviceMesh(dp=2, tp=4)", or "DeviceMesh(2, 4)" without names.
  std::string to_string() const;
  /// Returns whether both have the same ranks at the same coordinates, dimension names and device type.
  bool operator==(const DeviceMesh& other) const;

 private:
  struct State;
  void add_dims(State& part) const;
  explicit DeviceMesh(std::shared_ptr<const State> state) : state_(std::move(state)) {}
  std::shared_ptr<const State> state_;
};

}  // namespace tessera
