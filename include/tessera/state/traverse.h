#pragma once
/// \file
/// Walks through a nested state, and what is at a path of it. PyTorch: torch/distributed/checkpoint/_traverse.py.
///
/// A path is the keys and list indices that lead to a value. Keys of dicts are strings in a path whatever they are in
/// the dict: {0: x} has its x at "0".
///
/// What is visited. A dict is walked through, also an empty one, and never visited itself. A list is walked through if
/// it holds a dict, a list that is walked through, or something that `keep_traversing` takes; else it is visited as one
/// value. Everything else is visited: a tuple, too, whatever it holds. So PyTorch does it since 2.4; before that
/// (`until_2_3`) a dict, too, was visited as one value if nothing in it is to be walked to. Which of the two a
/// checkpoint was written with decides the names in it. The state dict itself is always walked through.
///
/// Where these differ from PyTorch: an index equal to a list's length is not there, rather than Python's IndexError; a
/// negative index is never there, and can't be set; a dict takes an int key at the end of a path as it does within one,
/// rather than only if it has more entries than the key says.

#include <cstdint>
#include <functional>
#include <string>

#include "tessera/state/value.h"

namespace tessera {

/// The parts, joined by dots: the flat name of the value there. "optimizer.param_groups.0.lr"
std::string flat_name(const Path& path);

enum class TraversalRules : std::uint8_t {
  since_2_4,  ///< dicts are walked through
  until_2_3,  ///< dicts without tensors are values
};

using Visitor = std::function<void(const Path& path, const Value& value)>;
using KeepTraversing = std::function<bool(const Value& item)>;

/// Whether it is a tensor of any kind: what PyTorch walks to unless told otherwise.
bool keep_visiting_tensors(const Value& item);

/// Calls `visit` for every value as above, in order. `keep_traversing` is asked about items of lists (and, until 2.3,
/// values of dicts); one that is empty takes nothing. Neither may change the state. Throws `Error(invalid_argument)`
/// for a state that nests deeper than 1000. O(values * depth).
void traverse_state_dict(const StateDict& state_dict, const Visitor& visit,
                         TraversalRules rules = TraversalRules::since_2_4,
                         const KeepTraversing& keep_traversing = keep_visiting_tensors);

/// Puts `value` at `path`. What is missing on the way is made: a dict where a string comes next, a list where an int
/// does; a list that is too short is filled up with None, and a None in a list counts as missing. Throws
/// `Error(invalid_argument)` naming path and place where the path is empty or leads through what can't have such a part
/// (a None in a dict included), and for an index that is negative or above 10 million.
void set_element(StateDict& root, const Path& path, Value value);

/// What is at `path`, the root being a dict: ints lead through lists and strings through dicts alone. Null if nothing
/// is there. The root itself for an empty path is nothing either. Valid until the state is changed.
const Value* get_element(const StateDict& root, const Path& path);
Value* get_element(StateDict& root, const Path& path);

namespace detail {
const Value& require_element(const StateDict& root, const Path& path, ValueKind expected);
}  // namespace detail

/// As `get_element`. Throws `Error(not_found)` naming the path if nothing is there, and `Error(invalid_argument)`
/// naming path and both kinds if it is no T; for T see Value::get_if.
template <typename T>
#if __has_cpp_attribute(gnu::no_dangling)
[[gnu::no_dangling]]  // what it returns lies in the root, whatever becomes of the path
#endif
const T&
require_element(const StateDict& root, const Path& path) {
  return detail::require_element(root, path, detail::kKindOf<T>).template get<T>();
}

}  // namespace tessera
