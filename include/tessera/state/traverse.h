#pragma once
/// \file
/// Traverses a nested state dict, and gets and sets the value at a path.
/// PyTorch: torch/distributed/checkpoint/_traverse.py.
///
/// A path consists of the dict keys and list indices that lead to a value. A dict key is a string in a path, whatever
/// its type in the dict: in {0: x}, x is at "0".
///
/// Traversal rules. A dict is traversed, even if it is empty, and never visited itself. A list is traversed if it holds
/// a dict, a list that is traversed, or an item that `keep_traversing` accepts; otherwise it is visited as one value.
/// All other values are visited, including tuples, whatever they hold. These are the rules since PyTorch 2.4. The rules
/// before (`until_2_3`) also visit a dict as one value, unless it leads to something that `keep_traversing` accepts.
/// The rules decide the names in a checkpoint. The state dict itself is always traversed.
///
/// Differences from PyTorch: at an index equal to the length of a list there is no element, where PyTorch raises
/// IndexError. A negative index never has an element and cannot be set. A dict accepts an int key at the end of a path
/// as it does inside one, where PyTorch requires more entries than the key's value.

#include <cstdint>
#include <string>

#include "tessera/base/function_ref.h"
#include "tessera/state/value.h"

namespace tessera {

/// Returns the parts of a path joined by dots, which is the flat name of the value: "optimizer.param_groups.0.lr".
std::string flat_name(const Path& path);

enum class TraversalRules : std::uint8_t {
  since_2_4,  ///< all dicts are traversed
  until_2_3,  ///< dicts without tensors are visited as values
};

using Visitor = FunctionRef<void(const Path& path, const Value& value)>;
using KeepTraversing = FunctionRef<bool(const Value& item)>;

/// Returns whether `item` is a tensor of any kind. PyTorch's default for `keep_traversing`.
bool keep_visiting_tensors(const Value& item);

/// Calls `visit` for every value by the rules above, in order. `keep_traversing` is called for items of lists and,
/// until 2.3, for values of dicts; an empty function accepts nothing. Neither function may change the state. Throws
/// `Error(invalid_argument)` for a state nested deeper than 1000. O(values * depth).
void traverse_state_dict(const StateDict& state_dict, Visitor visit, TraversalRules rules = TraversalRules::since_2_4,
                         KeepTraversing keep_traversing = keep_visiting_tensors);

/// Puts `value` at `path`. Creates missing containers on the way: a dict before a string, a list before an int. Extends
/// a list that is too short with None. A None in a list counts as missing; a None in a dict does not. Throws
/// `Error(invalid_argument)` naming path and position if the path is empty, if it leads through a value that cannot
/// have such an element, and for an index that is negative or above 10 million.
void set_element(StateDict& root, const Path& path, Value value);

/// Returns the value at `path`, or null if there is none or the path is empty. Ints select only items of lists, strings
/// only entries of dicts. The pointer is valid until the state is changed.
const Value* get_element(const StateDict& root, const Path& path);
Value* get_element(StateDict& root, const Path& path);

namespace detail {
const Value& require_element(const StateDict& root, const Path& path, ValueKind expected);
}  // namespace detail

/// Returns the value at `path` as a T; see Value::get_if for T. Throws `Error(not_found)` naming the path if there is
/// no value, and `Error(invalid_argument)` naming the path and both kinds if it is not a T.
template <typename T>
#if __has_cpp_attribute(gnu::no_dangling)
[[gnu::no_dangling]]  // the result belongs to the root, not to the path
#endif
const T&
require_element(const StateDict& root, const Path& path) {
  return detail::require_element(root, path, detail::kKindOf<T>).template get<T>();
}

}  // namespace tessera
