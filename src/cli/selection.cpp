#include "cli/selection.h"

#include <fmt/format.h>

#include <string_view>

namespace tessera::cli {

Option select_option(checkpoint::Selection& selection) {
  return {.name = "select",
          .value_name = "GLOB",
          .help = "Take only names that match this glob; can be given several times",
          .target = &selection.select};
}

Option exclude_option(checkpoint::Selection& selection) {
  return {.name = "exclude",
          .value_name = "GLOB",
          .help = "Leave out names that match this glob; can be given several times",
          .target = &selection.exclude};
}

void check_select_options(const checkpoint::Selection& selection,
                          const std::vector<const checkpoint::Checkpoint*>& checkpoints) {
  try {
    checkpoint::check_selection(selection, checkpoints);
  } catch (const Error& error) {
    throw UsageError(std::string("--") + error.what());
  }
}

}  // namespace tessera::cli
