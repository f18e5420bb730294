#pragma once
// The options --select and --exclude.

#include <vector>

#include "cli/command.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/convert.h"

namespace tessera::cli {

Option select_option(checkpoint::Selection& selection);
Option exclude_option(checkpoint::Selection& selection);

// checkpoint::check_selection, which throws UsageError.
void check_select_options(const checkpoint::Selection& selection,
                          const std::vector<const checkpoint::Checkpoint*>& checkpoints);

}  // namespace tessera::cli
