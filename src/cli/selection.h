#pragma once
// The options --select and --exclude.

#include <vector>

#include "cli/command.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/convert.h"

namespace tessera::cli {

Option select_option(checkpoint::Selection& selection);
Option exclude_option(checkpoint::Selection& selection);

// Throws UsageError if a --select glob matches no name in any of the checkpoints, or if the selection is empty: a
// misspelt name must not pass for an empty state.
void check_selection(const checkpoint::Selection& selection,
                     const std::vector<const checkpoint::Checkpoint*>& checkpoints);

}  // namespace tessera::cli
