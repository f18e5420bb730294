#pragma once
// The values of a state dict under the names that they have in a checkpoint.

#include <string>
#include <string_view>

#include "tessera/base/function_ref.h"
#include "tessera/base/internal/name_index.h"
#include "tessera/comm/process_group.h"
#include "tessera/state/traverse.h"
#include "tessera/state/value.h"

namespace tessera {

struct Flattening {
  bool state_dict = true;  // or the values of the outermost dict alone, under their keys
  TraversalRules rules = TraversalRules::since_2_4;
  // Whether nested sharded tensors are converted to plain ones, and left out if they have no shard on this rank.
  bool sharded_tensors = false;
};

// Called with the name of a value, which is the visitor's to keep, its path in the state dict, and itself.
using FlatVisitor = FunctionRef<void(std::string name, const Path& path, const Value& value)>;

// Calls `visit` for each value in the order of traversal. Throws as traverse_state_dict and flatten_sharded_tensors.
// Names may be equal: see require_unique_names. `group`: as for flatten_sharded_tensors.
void for_each_flat_value(const StateDict& state, const Flattening& how, const ProcessGroup& group, FlatVisitor visit);

[[noreturn]] void refuse_same_name(std::string_view name);

// Throws Error(invalid_argument) if two of `values`, which have a member `name`, have the same.
template <typename Values>
void require_unique_names(const Values& values) {
  NameIndex names;
  names.reserve(values.size());
  for (const auto& one : values) {
    if (!names.add(one.name, 0)) refuse_same_name(one.name);
  }
}

}  // namespace tessera
