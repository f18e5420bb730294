#pragma once
/// \file
/// A check that all ranks have a state of the same names.

#include "tessera/comm/process_group.h"
#include "tessera/state/value.h"

namespace tessera {

/// Checks that the flat names of `state_dict` (see flatten.h) are the same on all ranks. A save does not require this:
/// what one rank alone has is saved too. Call it before a save if such a name can only be a mistake. A collective of
/// `group`. If names differ, every rank throws `Error(invalid_argument)` naming a rank and up to 20 names that it
/// lacks. PyTorch: `_assert_same_keys`, which compares the outermost keys.
void check_same_keys(const StateDict& state_dict, const ProcessGroup& group);

}  // namespace tessera
