#pragma once
/// \file
/// Converts a nested state dict to one dict with flat names, as stored in a checkpoint, and back.
/// PyTorch: torch/distributed/checkpoint/_nested_dict.py.
///
/// Laws, for f = flatten_state_dict(s):
///   unflatten_state_dict(f.state_dict, f.mapping) == s, if all keys in s are strings and s has no empty dict where
///     dicts are traversed (an empty dict leaves no trace)
///   f.mapping and f.state_dict have the same names, and flat_name(f.mapping[name]) == name

#include <functional>
#include <map>
#include <string>

#include "tessera/state/traverse.h"
#include "tessera/state/value.h"

namespace tessera {

/// Maps flat names to paths. PyTorch: FLATTEN_MAPPING, and `planner_data` in `.metadata`.
using FlattenMapping = std::map<std::string, Path, std::less<>>;

struct FlatStateDict {
  StateDict state_dict;    ///< keyed by flat name, in the order of traversal
  FlattenMapping mapping;  ///< the path of each name
};

/// Returns every value that `traverse_state_dict` visits under its flat name: {"a": {"b": x}} becomes {"a.b": x}.
/// Throws `Error(invalid_argument)` naming the flat name if two values would have the same one.
FlatStateDict flatten_state_dict(const StateDict& state_dict, TraversalRules rules = TraversalRules::since_2_4);

/// Puts every value of `state_dict` at the path of its name, in order, with `set_element`. Throws `Error(not_found)`
/// for a name without a path, and as `set_element`.
StateDict unflatten_state_dict(const StateDict& state_dict, const FlattenMapping& mapping);

}  // namespace tessera
