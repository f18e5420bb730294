#include "tessera/tensor/device_mesh.h"

#include <c10/core/Device.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <set>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/layout/mesh_layout.h"

namespace tessera {

namespace {

using Dims = std::vector<std::size_t>;  // of the original mesh, ascending

// The original mesh, with the groups that it and its sub-meshes share.
class Root {
 public:
  Root(const ProcessGroup& group, std::vector<std::int64_t> shape, std::vector<int> ranks)
      : group_(group), shape_(std::move(shape)), ranks_(std::move(ranks)) {
    const auto mine = std::find(ranks_.begin(), ranks_.end(), group_.rank());
    if (mine != ranks_.end()) coordinate_ = mesh_coordinate(shape_, mine - ranks_.begin());
  }

  // Uses these groups of this rank, one along each dimension, instead of making them.
  void use_groups(const std::vector<ProcessGroup>& dim_groups) {
    for (std::size_t d = 0; d < shape_.size(); ++d) {
      groups_[{d}] = coordinate_ ? std::optional(dim_groups[d]) : std::nullopt;
    }
  }

  const ProcessGroup& group() const { return group_; }
  const std::vector<std::int64_t>& shape() const { return shape_; }
  const std::optional<std::vector<std::int64_t>>& coordinate() const { return coordinate_; }

  int rank_at(std::int64_t place) const { return ranks_[static_cast<std::size_t>(place)]; }

  // Returns this rank's group, which must exist; null outside of the mesh.
  const ProcessGroup* group_of(const Dims& dims) const {
    const std::optional<ProcessGroup>& group = groups_.at(dims);
    return group ? &*group : nullptr;
  }

  // Returns the same if it exists, otherwise null.
  const ProcessGroup* find_group(const Dims& dims) const { return groups_.count(dims) != 0 ? group_of(dims) : nullptr; }

  // A collective on the first call with `dims`.
  void make_groups(const Dims& dims) {
    if (groups_.count(dims) != 0) return;
    std::optional<ProcessGroup> mine;
    std::set<std::int64_t> seen;
    for (std::int64_t i = 0; i < mesh_size(shape_); ++i) {
      if (seen.count(i) != 0) continue;
      const std::vector<int> ranks = ranks_along(dims, mesh_coordinate(shape_, i), seen);
      std::optional<ProcessGroup> group = is_all(ranks) ? group_ : group_.subgroup(ranks);
      if (group) mine = std::move(group);
    }
    groups_[dims] = std::move(mine);
  }

  // Returns the ranks whose coordinates differ from `coordinate` only in `dims`, and adds their row-major indices to
  // `seen`.
  std::vector<int> ranks_along(const Dims& dims, std::vector<std::int64_t> coordinate,
                               std::set<std::int64_t>& seen) const {
    std::vector<std::int64_t> lengths;
    for (const std::size_t d : dims) lengths.push_back(shape_[d]);
    std::vector<int> ranks;
    for (std::int64_t i = 0; i < mesh_size(lengths); ++i) {
      const std::vector<std::int64_t> along = mesh_coordinate(lengths, i);
      for (std::size_t k = 0; k < dims.size(); ++k) coordinate[dims[k]] = along[k];
      const std::int64_t place = mesh_index(shape_, coordinate);
      seen.insert(place);
      ranks.push_back(rank_at(place));
    }
    return ranks;
  }

 private:
  bool is_all(const std::vector<int>& ranks) const {
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      if (ranks[i] != static_cast<int>(i)) return false;
    }
    return ranks.size() == static_cast<std::size_t>(group_.size());
  }

  ProcessGroup group_;
  std::vector<std::int64_t> shape_;
  std::vector<int> ranks_;
  std::optional<std::vector<std::int64_t>> coordinate_;
  std::map<Dims, std::optional<ProcessGroup>> groups_;
};

std::vector<int> first_ranks(std::size_t count) {
  std::vector<int> ranks(count);
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

void check(const ProcessGroup& group, const std::vector<std::int64_t>& shape, const std::vector<int>& ranks,
           const std::vector<std::string>& names) {
  if (mesh_size(shape) != static_cast<std::int64_t>(ranks.size())) {
    fail(ErrorCode::invalid_argument, "device mesh of shape {}: {} ranks, expected {}", shape_to_string(shape),
         ranks.size(), mesh_size(shape));
  }
  std::set<int> seen;
  for (const int rank : ranks) {
    if (rank < 0 || rank >= group.size() || !seen.insert(rank).second) {
      fail(ErrorCode::invalid_argument, "device mesh of the ranks [{}]: expected ranks of 0 to {}, each once",
           fmt::join(ranks, ", "), group.size() - 1);
    }
  }
  const std::set<std::string> different(names.begin(), names.end());
  if (!names.empty() && (names.size() != shape.size() || different.size() != names.size() || names.front().empty() ||
                         different.count("") != 0)) {
    fail(ErrorCode::invalid_argument,
         "device mesh of shape {}: dimensions are named [{}], expected a distinct name for each",
         shape_to_string(shape), fmt::join(names, ", "));
  }
}

std::string describe_dim(std::size_t dim, const std::vector<std::string>& names) {
  return fmt::format("dimension {} ('{}')", dim, names[dim]);
}

// Checks that `groups` are this rank's groups along the dimensions.
void check_groups(const Root& root, const std::vector<ProcessGroup>& groups, const std::vector<std::string>& names) {
  if (!root.coordinate()) {
    if (groups.empty()) return;
    fail(ErrorCode::invalid_argument, "{} groups on rank {}, expected none outside of the mesh", groups.size(),
         root.group().rank());
  }
  if (groups.size() != root.shape().size()) {
    fail(ErrorCode::invalid_argument, "{} groups on rank {}, expected {}, one for each dimension of {}", groups.size(),
         root.group().rank(), root.shape().size(), shape_to_string(root.shape()));
  }
  for (std::size_t d = 0; d < groups.size(); ++d) {
    std::set<std::int64_t> seen;
    std::vector<int> expected;
    for (const int rank : root.ranks_along({d}, *root.coordinate(), seen)) {
      expected.push_back(root.group().world_ranks()[static_cast<std::size_t>(rank)]);
    }
    if (groups[d].world_ranks() == expected) continue;
    fail(ErrorCode::invalid_argument,
         "the group of rank {} along {} has the world ranks [{}], expected [{}] as in the mesh", root.group().rank(),
         describe_dim(d, names), fmt::join(groups[d].world_ranks(), ", "), fmt::join(expected, ", "));
  }
}

// Checks that ranks along a dimension have the same group, not only one of the same ranks. A collective; if they do
// not, every rank throws.
void check_same_groups(const Root& root, const std::vector<ProcessGroup>& groups,
                       const std::vector<std::string>& names) {
  std::vector<std::string> mine(groups.size());
  std::transform(groups.begin(), groups.end(), mine.begin(), [](const ProcessGroup& group) { return group.name(); });
  std::vector<std::vector<std::string>> of_ranks;
  for (const Bytes& bytes : root.group().all_gather_bytes(as_bytes(nlohmann::json(mine).dump()))) {
    of_ranks.push_back(nlohmann::json::parse(bytes.begin(), bytes.end()).get<std::vector<std::string>>());
  }
  for (std::int64_t i = 0; i < mesh_size(root.shape()); ++i) {
    for (std::size_t d = 0; d < root.shape().size(); ++d) {
      std::vector<std::int64_t> coordinate = mesh_coordinate(root.shape(), i);
      coordinate[d] = 0;
      const int rank = root.rank_at(i), first = root.rank_at(mesh_index(root.shape(), coordinate));
      const std::string& found = of_ranks[static_cast<std::size_t>(rank)][d];
      const std::string& expected = of_ranks[static_cast<std::size_t>(first)][d];
      if (found == expected) continue;
      fail(ErrorCode::invalid_argument,
           "make a device mesh from groups: along {}, rank {} has the group {} and rank {} has {}, expected one group",
           describe_dim(d, names), first, expected, rank, found);
    }
  }
}

// Adds the arguments that must be equal on all ranks.
void add_arguments(CallArguments& arguments, const std::vector<std::int64_t>& shape, const std::vector<int>& ranks,
                   const std::vector<std::string>& names, c10::DeviceType device_type) {
  arguments.add_list("shape", shape)
      .add("ranks", fmt::format("[{}]", fmt::join(ranks, ", ")))
      .add("names", fmt::format("[{}]", fmt::join(names, ", ")))
      .add("device type", c10::DeviceTypeName(device_type));
}

std::vector<Dims> each_dim(std::size_t count) {
  std::vector<Dims> dims;
  for (std::size_t d = 0; d < count; ++d) dims.push_back({d});
  return dims;
}

}  // namespace

struct DeviceMesh::State {
  std::shared_ptr<Root> root;
  std::vector<Dims> dims;  // of each dimension, the dimensions of the original mesh
  std::vector<std::string> names;
  c10::DeviceType device_type = c10::DeviceType::CPU;

  // Derived from the members above.
  std::vector<std::int64_t> shape = {};
  std::vector<int> ranks = {};
  std::optional<std::vector<std::int64_t>> coordinate = {};
  Dims all = {};

  // A collective if a group does not exist yet.
  static std::shared_ptr<const State> make(State state) {
    Root& root = *state.root;
    for (const Dims& dims : state.dims) {
      std::int64_t length = 1;
      for (const std::size_t d : dims) {
        length *= root.shape()[d];
        state.all.push_back(d);
      }
      state.shape.push_back(length);
      root.make_groups(dims);
    }
    root.make_groups(state.all);
    std::set<std::int64_t> seen;
    const std::vector<std::int64_t> first(root.shape().size(), 0);
    state.ranks = root.ranks_along(state.all, root.coordinate().value_or(first), seen);
    if (const ProcessGroup* group = root.group_of(state.all)) {
      state.coordinate = mesh_coordinate(state.shape, group->rank());
    }
    return std::make_shared<const State>(std::move(state));
  }
};

DeviceMesh::DeviceMesh() : DeviceMesh(ProcessGroup(), {1}) {}

DeviceMesh::DeviceMesh(const ProcessGroup& group, std::vector<std::int64_t> shape, std::vector<std::string> dim_names,
                       c10::DeviceType device_type)
    : DeviceMesh(of_ranks(group, std::move(shape), first_ranks(static_cast<std::size_t>(group.size())),
                          std::move(dim_names), device_type)) {}

DeviceMesh DeviceMesh::of_ranks(const ProcessGroup& group, std::vector<std::int64_t> shape, std::vector<int> ranks,
                                std::vector<std::string> dim_names, c10::DeviceType device_type) {
  group.check_call("make a device mesh", [&](CallArguments& arguments) {
    check(group, shape, ranks, dim_names);
    add_arguments(arguments, shape, ranks, dim_names, device_type);
  });
  std::vector<Dims> dims = each_dim(shape.size());
  const auto root = std::make_shared<Root>(group, std::move(shape), std::move(ranks));
  return DeviceMesh(State::make({root, std::move(dims), std::move(dim_names), device_type}));
}

DeviceMesh DeviceMesh::from_group(const ProcessGroup& group, std::vector<std::string> dim_names,
                                  c10::DeviceType device_type) {
  return DeviceMesh(group, {group.size()}, std::move(dim_names), device_type);
}

DeviceMesh DeviceMesh::from_groups(const ProcessGroup& group, const std::vector<ProcessGroup>& dim_groups,
                                   std::vector<std::int64_t> shape, std::vector<int> ranks,
                                   std::vector<std::string> dim_names, c10::DeviceType device_type) {
  std::shared_ptr<Root> root;
  group.check_call("make a device mesh from groups", [&](CallArguments& arguments) {
    check(group, shape, ranks, dim_names);
    if (dim_names.empty()) {
      fail(ErrorCode::invalid_argument, "device mesh of shape {}: no names, expected one for each dimension",
           shape_to_string(shape));
    }
    add_arguments(arguments, shape, ranks, dim_names, device_type);
    root = std::make_shared<Root>(group, shape, ranks);
    check_groups(*root, dim_groups, dim_names);
  });
  check_same_groups(*root, dim_groups, dim_names);
  root->use_groups(dim_groups);
  return DeviceMesh(State::make({root, each_dim(shape.size()), std::move(dim_names), device_type}));
}

const std::vector<std::int64_t>& DeviceMesh::shape() const { return state_->shape; }
std::int64_t DeviceMesh::size() const { return static_cast<std::int64_t>(state_->ranks.size()); }
const std::vector<int>& DeviceMesh::ranks() const { return state_->ranks; }
const std::vector<std::string>& DeviceMesh::dim_names() const { return state_->names; }
c10::DeviceType DeviceMesh::device_type() const { return state_->device_type; }
const std::optional<std::vector<std::int64_t>>& DeviceMesh::coordinate() const { return state_->coordinate; }

std::int64_t DeviceMesh::size(std::int64_t dim) const {
  if (dim < 0 || dim >= ndim()) {
    fail(ErrorCode::invalid_argument, "{} has no dimension {}: expected 0 to {}", to_string(), dim, ndim() - 1);
  }
  return shape()[static_cast<std::size_t>(dim)];
}

std::int64_t DeviceMesh::dim(std::string_view name) const {
  const auto found = std::find(dim_names().begin(), dim_names().end(), name);
  if (found == dim_names().end()) {
    fail(ErrorCode::invalid_argument, "{} has no dimension '{}': expected one of [{}]", to_string(), name,
         fmt::join(dim_names(), ", "));
  }
  return found - dim_names().begin();
}

std::int64_t DeviceMesh::local_rank(std::int64_t dim) const {
  size(dim);  // checks `dim`
  if (!has_this_rank())
    fail(ErrorCode::invalid_argument, "this rank is not in {}, expected a rank of the mesh", to_string());
  return (*coordinate())[static_cast<std::size_t>(dim)];
}

const ProcessGroup& DeviceMesh::group(std::int64_t dim) const {
  local_rank(dim);
  return *state_->root->group_of(state_->dims[static_cast<std::size_t>(dim)]);
}

const ProcessGroup& DeviceMesh::group() const {
  if (!has_this_rank())
    fail(ErrorCode::invalid_argument, "this rank is not in {}, expected a rank of the mesh", to_string());
  return *state_->root->group_of(state_->all);
}

const ProcessGroup* DeviceMesh::find_group(std::span<const std::int64_t> dims) const {
  Dims of_root;
  for (const std::int64_t d : dims) {
    size(d);  // checks `d`
    const Dims& each = state_->dims[static_cast<std::size_t>(d)];
    of_root.insert(of_root.end(), each.begin(), each.end());
  }
  return state_->root->find_group(of_root);
}

DeviceMesh DeviceMesh::operator[](std::string_view name) const { return submesh({std::string(name)}); }

DeviceMesh DeviceMesh::submesh(std::initializer_list<std::string> names) const {
  return submesh(std::span(names.begin(), names.size()));
}

DeviceMesh DeviceMesh::submesh(std::span<const std::string> names) const {
  State part{state_->root, {}, {names.begin(), names.end()}, device_type()};
  if (names.size() > 1 && static_cast<std::int64_t>(names.size()) != ndim()) {
    state_->root->group().check_call("make a sub-mesh", [&](CallArguments& arguments) {
      add_dims(part);
      arguments.add("names", fmt::format("[{}]", fmt::join(names, ", "))).add("mesh", to_string());
    });
  } else {
    add_dims(part);
  }
  return DeviceMesh(State::make(std::move(part)));
}

// Adds the dimensions of the mesh that have the names of `part`.
void DeviceMesh::add_dims(State& part) const {
  const std::vector<std::string>& names = part.names;
  std::int64_t last = -1;
  for (const std::string& name : names) {
    const std::int64_t d = dim(name);
    if (d <= last) {
      fail(ErrorCode::invalid_argument, "sub-mesh [{}] of {}: expected each dimension once, in the order of the mesh",
           fmt::join(names, ", "), to_string());
    }
    part.dims.push_back(state_->dims[static_cast<std::size_t>(d)]);
    last = d;
  }
  if (names.empty())
    fail(ErrorCode::invalid_argument, "sub-mesh of {}: no dimensions, expected at least one", to_string());
}

DeviceMesh DeviceMesh::flattened(std::string name) const {
  if (name.empty()) {
    fail(ErrorCode::invalid_argument, "flattened {}: its dimension is named '', expected a name", to_string());
  }
  return DeviceMesh(State::make({state_->root, {state_->all}, {std::move(name)}, device_type()}));
}

std::string DeviceMesh::to_string() const {
  std::vector<std::string> dims;
  for (std::size_t d = 0; d < shape().size(); ++d) {
    dims.push_back(dim_names().empty() ? fmt::to_string(shape()[d]) : fmt::format("{}={}", dim_names()[d], shape()[d]));
  }
  return fmt::format("DeviceMesh({})", fmt::join(dims, ", "));
}

bool DeviceMesh::operator==(const DeviceMesh& other) const {
  return state_ == other.state_ ||
         (shape() == other.shape() && ranks() == other.ranks() && dim_names() == other.dim_names() &&
          device_type() == other.device_type() && has_this_rank() == other.has_this_rank() &&
          (!has_this_rank() || group().world_ranks() == other.group().world_ranks()));
}

}  // namespace tessera
