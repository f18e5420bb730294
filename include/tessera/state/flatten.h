#pragma once
/// \file
/// A nested state as one dict of flat names, which is how a checkpoint has it, and back.
/// PyTorch: torch/distributed/checkpoint/_nested_dict.py.
///
/// Laws: unflatten_state_dict(f.state_dict, f.mapping) == s for f = flatten_state_dict(s), if all keys in s are strings
/// and no dict that is walked through is empty (nothing is left of one). f.mapping has a path for every name in
/// f.state_dict and for no other, and flat_name of it is that name.

#include <functional>
#include <map>
#include <string>

#include "tessera/state/traverse.h"
#include "tessera/state/value.h"

namespace tessera {

/// From flat names to paths. PyTorch: FLATTEN_MAPPING, and `planner_data` in `.metadata`.
using FlattenMapping = std::map<std::string, Path, std::less<>>;

struct FlatStateDict {
  StateDict state_dict;    ///< by flat name, in the order of the traversal
  FlattenMapping mapping;  ///< of the same names
};

/// Every value that `traverse_state_dict` visits, by its flat name: {"a": {"b": x}} becomes {"a.b": x}. Throws
/// `Error(invalid_argument)` naming a name that two values would have.
FlatStateDict flatten_state_dict(const StateDict& state_dict, TraversalRules rules = TraversalRules::since_2_4);

/// Puts every value of `state_dict` at the path of its name (set_element, in order). Throws `Error(not_found)` for a
/// name without a path, and as set_element.
StateDict unflatten_state_dict(const StateDict& state_dict, const FlattenMapping& mapping);

}  // namespace tessera
