// Interprets the calls in a data.pkl that make DTensors. PyTorch: torch/distributed/tensor/_api.py, _dtensor_spec.py,
// torch/distributed/device_mesh.py; the form of the mesh differs between PyTorch 2.8 and 2.9.

#include <algorithm>

#include "tessera/base/checked.h"
#include "tessera/base/error.h"
#include "tessera/format/python_value.h"
#include "tessera/format/torch_archive.h"
#include "tessera/layout/box.h"

namespace tessera::torch_archive {
namespace {

using pickle::Kind;
using pickle::NodeRef;

// A pickle can define a tuple or a dict once and refer to it often, so what is read for one tensor is limited.
constexpr std::size_t kMostAttributes = 250;  // of one object
constexpr std::size_t kMostLengths = 1000;    // of one mesh or shape

template <typename... Args>
[[noreturn]] void malformed_dtensor(fmt::format_string<Args...> format, Args&&... args) {
  fail(ErrorCode::corrupt, "DTensor in data.pkl: {}", fmt::format(format, std::forward<Args>(args)...));
}

template <typename... Args>
[[noreturn]] void unknown_dtensor(fmt::format_string<Args...> format, Args&&... args) {
  fail(ErrorCode::unsupported, "DTensor in data.pkl: {}", fmt::format(format, std::forward<Args>(args)...));
}

bool is_call_of(NodeRef value, std::string_view module, std::string_view name) {
  return value.is(Kind::object) && value.object().calls(module, name) && value.object().arguments.is(Kind::tuple);
}

// The class is in torch.distributed.tensor since PyTorch 2.5, and was in torch.distributed._tensor before.
bool is_dtensor_class(NodeRef value) {
  return value.is(Kind::global) && value.global().name == "DTensor" &&
         value.global().module.starts_with("torch.distributed.");
}

// Returns an attribute of an object's state, which is a dict or a pair of dicts (of attributes and of slots).
std::optional<NodeRef> attribute(NodeRef state, std::string_view name) {
  if (state.is(Kind::dict)) {
    if (state.pairs().size() > kMostAttributes) {
      malformed_dtensor("an object of {} attributes, expected at most {}", state.pairs().size(), kMostAttributes);
    }
    return state.find(name);
  }
  if (!state.is(Kind::tuple) || state.items().size() != 2) return std::nullopt;
  for (const NodeRef part : state.items()) {
    if (!part.is(Kind::dict)) continue;
    if (const std::optional<NodeRef> found = attribute(part, name)) return found;
  }
  return std::nullopt;
}

std::optional<NodeRef> attribute_of(NodeRef object, std::string_view name) {
  if (!object.is(Kind::object) || !object.object().has_state) return std::nullopt;
  return attribute(object.object().state, name);
}

// Returns "no dim", or "dim 'x'", for messages.
std::string found_attribute(std::string_view name, const std::optional<NodeRef>& value) {
  return value ? fmt::format("{} {}", name, pickle::repr(*value, 100)) : fmt::format("no {}", name);
}

std::vector<std::int64_t> int_list(NodeRef value, std::string_view what) {
  NodeRef list = value;
  if (is_call_of(list, "torch", "Size") && list.object().arguments.items().size() == 1) {
    list = list.object().arguments.items()[0];
  }
  if ((list.is(Kind::tuple) || list.is(Kind::list)) && list.items().size() > kMostLengths) {
    malformed_dtensor("{} has {} dimensions, expected at most {}", what, list.items().size(), kMostLengths);
  }
  const std::optional<std::vector<std::int64_t>> numbers = pickle::as_int_list(list);
  if (!numbers) malformed_dtensor("{} is a {}, expected ints", what, pickle::type_name(value));
  for (const std::int64_t number : *numbers) {
    if (number < 0) malformed_dtensor("{} has {}, expected 0 or more", what, number);
  }
  return *numbers;
}

// Returns the number of ranks along a mesh dimension, which may be nested: (2, (3, 4)) is 2 x 12. Takes each number and
// tuple from `left`.
std::int64_t length_of(NodeRef value, std::size_t& left, std::size_t depth = 0) {
  constexpr std::size_t kMaxDepth = 8;
  if (left-- == 0) malformed_dtensor("a mesh of more lengths than the limit, expected at most {}", kMostLengths);
  if (value.is(Kind::integer) && value.integer() > 0) return value.integer();
  if (!value.is(Kind::tuple) || depth > kMaxDepth) {
    malformed_dtensor(
        "a mesh with the length {}, expected an int of at least 1, or a tuple of them nested at most {} deep",
        pickle::repr(value, 100), kMaxDepth + 1);
  }
  std::int64_t length = 1;
  for (const NodeRef item : value.items()) {
    length = checked_multiply(length, length_of(item, left, depth + 1), "DTensor in data.pkl: size of a mesh");
  }
  return length;
}

std::vector<std::int64_t> mesh_shape(NodeRef mesh) {
  if (const std::optional<NodeRef> ranks = attribute_of(mesh, "mesh")) {
    const std::optional<TensorRef> tensor = as_tensor(*ranks);
    if (!tensor) unknown_dtensor("the ranks of its mesh are a {}, expected a tensor", pickle::type_name(*ranks));
    return tensor->sizes;
  }
  const std::optional<NodeRef> layout = attribute_of(mesh, "_layout");
  if (!layout)
    unknown_dtensor("its mesh is a {} without mesh and _layout, expected one of these", pickle::type_name(mesh));
  std::vector<std::int64_t> shape;
  std::size_t left = kMostLengths;
  if (const std::optional<NodeRef> axes = attribute_of(*layout, "axes"); axes && axes->is(Kind::tuple)) {
    for (const NodeRef axis : axes->items()) {
      const std::optional<NodeRef> lengths = attribute_of(axis, "shape");
      if (!lengths) unknown_dtensor("an axis of its mesh is a {} without shape, expected one", pickle::type_name(axis));
      shape.push_back(length_of(*lengths, left));
    }
    return shape;
  }
  const std::optional<NodeRef> lengths = attribute_of(*layout, "shape");
  if (!lengths) {
    unknown_dtensor("the layout of its mesh is a {} without axes and shape, expected one of these",
                    pickle::type_name(*layout));
  }
  if (!lengths->is(Kind::tuple)) return {length_of(*lengths, left)};
  for (const NodeRef length : lengths->items()) shape.push_back(length_of(length, left));
  return shape;
}

Placement placement_of(NodeRef value) {
  if (value.is(Kind::object) && value.object().callable.is(Kind::global)) {
    const std::string_view name = value.object().callable.global().name;
    if (name == "Replicate") return Placement::replicate();
    if (name == "Shard" || name == "_StridedShard") {
      const std::optional<NodeRef> dim = attribute_of(value, "dim");
      if (!dim || !dim->is(Kind::integer))
        malformed_dtensor("a {} with {}, expected an int", name, found_attribute("dim", dim));
      if (name == "Shard") return Placement::shard(dim->integer());
      const std::optional<NodeRef> factor = attribute_of(value, "split_factor");
      if (!factor || !factor->is(Kind::integer) || factor->integer() < 1)
        malformed_dtensor("a {} with {}, expected an int of at least 1", name, found_attribute("split_factor", factor));
      return Placement::strided_shard(dim->integer(), factor->integer());
    }
  }
  unknown_dtensor("it is placed as {}, expected Shard, _StridedShard or Replicate", pickle::type_name(value));
}

// Returns the state of a DTensor: a dict with the local tensor and the specification.
std::optional<NodeRef> dtensor_state(NodeRef value) {
  if (is_call_of(value, "torch._utils", "_rebuild_parameter") && !value.object().arguments.items().empty()) {
    value = value.object().arguments.items()[0];
  }
  if (!is_call_of(value, "torch._tensor", "_rebuild_from_type_v2")) return std::nullopt;
  const std::span<const NodeRef> arguments = value.object().arguments.items();
  if (arguments.size() != 4 || !arguments[0].is_global("torch._utils", "_rebuild_wrapper_subclass") ||
      !is_dtensor_class(arguments[1])) {
    return std::nullopt;
  }
  return arguments[3];
}

TensorRef local_tensor(NodeRef state) {
  const std::optional<NodeRef> value = attribute(state, "_local_tensor");
  if (!value) malformed_dtensor("it has no _local_tensor, expected a tensor");
  const std::optional<TensorRef> local = as_tensor(*value);
  if (!local) unknown_dtensor("its local tensor is a {}, expected a strided tensor", pickle::type_name(*value));
  return *local;
}

}  // namespace

std::optional<TensorRef> as_local_tensor(NodeRef value) {
  const std::optional<NodeRef> state = dtensor_state(value);
  return state ? std::optional(local_tensor(*state)) : std::nullopt;
}

std::optional<DTensorRef> as_dtensor(NodeRef value) {
  const std::optional<NodeRef> state = dtensor_state(value);
  if (!state) return std::nullopt;
  DTensorRef result;
  result.local = local_tensor(*state);
  const std::optional<NodeRef> spec = attribute(*state, "_spec");
  const std::optional<NodeRef> mesh = spec ? attribute_of(*spec, "mesh") : std::nullopt;
  const std::optional<NodeRef> placements = spec ? attribute_of(*spec, "placements") : std::nullopt;
  const std::optional<NodeRef> meta = spec ? attribute_of(*spec, "tensor_meta") : std::nullopt;
  if (!mesh || !placements || !meta || !placements->is(Kind::tuple)) {
    malformed_dtensor("it has no {}, expected a _spec with mesh, a tuple of placements, and tensor_meta",
                      !spec   ? "_spec"
                      : !mesh ? "mesh"
                      : !meta ? "tensor_meta"
                              : "tuple of placements");
  }
  if (!meta->is(Kind::object) || !meta->object().arguments.is(Kind::tuple) ||
      meta->object().arguments.items().empty()) {
    malformed_dtensor("its tensor_meta is a {}, expected a TensorMeta", pickle::type_name(*meta));
  }
  result.shape = int_list(meta->object().arguments.items()[0], "its shape");
  result.mesh_shape = mesh_shape(*mesh);
  const std::optional<NodeRef> coordinate = attribute_of(*mesh, "_coordinate_on_dim");
  if (!coordinate)
    unknown_dtensor("its mesh is a {} without _coordinate_on_dim, expected one", pickle::type_name(*mesh));
  result.coordinate = int_list(*coordinate, "the rank's coordinate in the mesh");
  for (const NodeRef item : placements->items()) result.placements.push_back(placement_of(item));
  bool is_inside = result.coordinate.size() == result.mesh_shape.size();
  for (std::size_t d = 0; is_inside && d < result.mesh_shape.size(); ++d) {
    is_inside = result.coordinate[d] < result.mesh_shape[d];
  }
  if (!is_inside) {
    malformed_dtensor("the rank has the coordinate {} in a mesh of shape {}, expected one inside of it",
                      shape_to_string(result.coordinate), shape_to_string(result.mesh_shape));
  }
  return result;
}

}  // namespace tessera::torch_archive
