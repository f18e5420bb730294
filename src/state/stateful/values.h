#pragma once
// The Statefuls in a state dict, which are values of the outermost dict or of dicts in it.

#include <string_view>

#include "tessera/comm/process_group.h"
#include "tessera/state/value.h"

namespace tessera {

// Adds the names of all Statefuls, which must be equal on all ranks. Returns whether there are any. Throws
// Error(invalid_argument) for one in a list or a tuple.
bool describe_stateful(const StateDict& state, CallArguments& arguments);

// Returns a copy of `state` with the state of each Stateful in its place. A collective: the ranks agree on the outcome
// of each, so that no rank begins the next one, which may communicate, if another rank failed.
StateDict with_states(const StateDict& state, const ProcessGroup& group, std::string_view operation);

// Sets each Stateful of `state` to its state in `loaded`, and puts it there in place of the state. A collective, as
// with_states.
void load_states(const StateDict& state, StateDict& loaded, const ProcessGroup& group);

}  // namespace tessera
