#pragma once
// The values of a state dict under the names that they have in a checkpoint.

#include <string>
#include <vector>

#include "tessera/comm/process_group.h"
#include "tessera/state/traverse.h"
#include "tessera/state/value.h"

namespace tessera {

struct FlatValue {
  std::string name;
  Path path;  // in the state dict
  Value value;
};

// Returns what flatten_state_dict returns, in the order of traversal. Throws as that.
std::vector<FlatValue> flat_values(const StateDict& state, TraversalRules rules = TraversalRules::since_2_4);

// Returns the values of the outermost dict alone, under their keys.
std::vector<FlatValue> outermost_values(const StateDict& state);

// Converts nested sharded tensors to plain ones; leaves out those without a shard on this rank.
void flatten_nested(std::vector<FlatValue>& values, const ProcessGroup& group);

}  // namespace tessera
