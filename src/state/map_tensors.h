#pragma once
// The tensors of a nested state dict, including those in lists and tuples, in order.

#include "tessera/base/function_ref.h"
#include "tessera/state/value.h"

namespace tessera {

// Calls `f` for each tensor of any kind.
void for_each_tensor(const StateDict& state, FunctionRef<void(const Path& path, const Value& tensor)> f);
// Returns a copy of `state` with `f(tensor)` in place of each tensor of any kind.
StateDict map_tensors(const StateDict& state, FunctionRef<Value(const Value& tensor)> f);

}  // namespace tessera
